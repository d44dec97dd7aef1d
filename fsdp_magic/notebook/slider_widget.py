"""KERNEL: the slider as a widget; needs anywidget, so only ``slider`` imports it.

The page asks with a message and shows what the kernel answers: a size is taken when the line under
the slider says so. While a cell runs the kernel answers nobody, and the line says that it waits.
All words come from the kernel, so that they are those of the panel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.panels import slider_view
from fsdp_magic.panels.parts import RULE, one_line
from fsdp_magic.panels.slider_view import SliderData, uses_text

_ESM = r"""
const make = (tag, style, parent) => {
  const element = document.createElement(tag);
  element.style.cssText = style;
  parent.append(element);
  return element;
};

function render({ model, el }) {
  const stops = model.get("stops");
  const root = make("div", model.get("look"), el);
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "Batch size");
  root.dataset.lmSuppressShortcuts = "true";  // arrow keys move the slider, not the notebook
  const head = make("div", "", root);
  make("b", "", head).textContent = "Batch size ";
  make("span", "opacity:.7", head).textContent = "micro-batch size per rank ";
  const row = make("div", "display:flex;align-items:center;gap:8px", root);
  make("span", "opacity:.7", row).textContent = stops[0].name;
  const range = make("input", "flex:1 1 0%;min-width:0;accent-color:#3A78C9", row);
  range.setAttribute("aria-label", "micro-batch size per rank");
  Object.assign(range, { type: "range", min: 0, max: stops.length - 1, step: 1 });
  make("span", "opacity:.7", row).textContent = stops.at(-1).name;
  const said = make("div", "font-variant-numeric:tabular-nums", root);
  const sign = make("span", "", said), words = make("span", "", said);
  const track = make("div", "position:relative;height:8px;margin:3px 0 4px 0;border-radius:3px;"
    + "overflow:hidden;background:rgba(128,128,128,.2)", root);
  const fill = make("div", "height:8px", track);
  const answer = make("div", "opacity:.7", root);
  answer.setAttribute("role", "status");

  const show = () => {
    const stop = stops[+range.value];
    fill.style.width = `${100 * Math.min(1, stop.share ?? 0)}%`;
    fill.style.background = sign.style.color = stop.colour;
    sign.textContent = `${stop.sign} `;
    words.textContent = stop.line;
    range.setAttribute("aria-valuetext", stop.line);
  };
  const settle = () => {
    range.value = stops.findIndex((stop) => stop.size === model.get("value"));
    answer.textContent = model.get("answer");
    show();
  };
  let timer;
  const ask = () => {
    answer.textContent = "asking the kernel, which answers when no cell runs …";
    model.send({ size: stops[+range.value].size });
  };
  range.addEventListener("input", show);
  range.addEventListener("change", () => {  // every press of an arrow key is a change
    clearTimeout(timer);
    timer = setTimeout(ask, 250);
  });
  for (const kind of ["keydown", "keyup", "keypress"])
    root.addEventListener(kind, (event) => event.stopPropagation());
  model.on("change:answered", settle);
  settle();
  return () => {
    clearTimeout(timer);
    model.off("change:answered", settle);
  };
}

export default { render };
"""
_LOOK = (
    "font-size:13px;line-height:1.45;max-width:920px;padding:10px 12px;box-sizing:border-box;"
    f"border:{RULE};border-radius:6px;text-align:left;color:var(--jp-content-font-color1,inherit)"
)


class BatchSizeSlider(anywidget.AnyWidget):  # type: ignore[misc]
    """A slider over sizes.

    Attributes:
        value: the size that is taken.
        answer: what the kernel says of the size that was asked for last.
        answered: how many sizes were asked for; the page shows the answer when it changes.
        stops: what the page shows at each stop of the slider.
    """

    _esm = _ESM
    value = traitlets.Int().tag(sync=True)
    answer = traitlets.Unicode().tag(sync=True)
    answered = traitlets.Int().tag(sync=True)
    stops: Any = traitlets.List().tag(sync=True)
    look = traitlets.Unicode(_LOOK).tag(sync=True)

    def __init__(self, data: SliderData, on_change: Callable[[int], None]) -> None:
        """Make a slider; see ``slider.slider`` for its arguments."""
        self._data, self._on_change = data, on_change
        super().__init__(value=data.value, stops=_stops(data), answer=uses_text(data.value))
        self.on_msg(self._asked)

    def ask(self, size: int) -> None:
        """Take a size, or say why not."""
        try:
            self._on_change(size)
        except FsdpError as error:
            answer = one_line(error)
        else:
            answer = ""
        with self.hold_sync():  # one message: the page never sees half an answer
            self.value = self.value if answer else size
            self.answer = answer or uses_text(size)
            self.answered += 1

    def _asked(self, _widget: Any, content: Any, _buffers: Any) -> None:
        size = content.get("size") if isinstance(content, dict) else None
        if size in [offered.micro_batch_size for offered in self._data.offered]:
            self.ask(int(size))

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, and what stands in its place where no kernel runs."""
        shown = super()._repr_mimebundle_(**kwargs)
        data, metadata = shown if isinstance(shown, tuple) else (shown or {}, {})
        stand_in = {
            "text/html": slider_view.html(self._data, value=self.value),
            "text/plain": slider_view.text(self._data, value=self.value),
        }
        return {**data, **stand_in}, metadata


def _stops(data: SliderData) -> list[dict[str, Any]]:
    """Return what the page shows at each size."""
    stops = []
    for size in data.offered:
        sign, colour, _ = data.judgement(size)
        stops.append(
            {
                "size": size.micro_batch_size,
                "name": f"{size.micro_batch_size:,}",
                "line": data.line(size),
                "share": data.share(size),
                "sign": sign,
                "colour": colour,
            }
        )
    return stops
