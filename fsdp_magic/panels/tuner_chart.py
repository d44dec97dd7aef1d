"""The tuner's chart: peak memory and speed against the micro-batch size, with words at them; pure.

It keeps one height from the first frame to the last. While a search is under way it is inline
SVG, which a browser redraws cheaply; in the frame that stays in the file it is an image.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.core.units import bytes_text, count_text
from fsdp_magic.panels.label_places import LABEL_HEIGHT, Label, Point, Spot, place, text_width
from fsdp_magic.panels.parts import NUMBERS, escape, image, muted, shortened
from fsdp_magic.panels.tuner_picture import (
    HEIGHT,
    STRIP_HEIGHT,
    STRIP_TOP,
    fastest,
    mark,
    svg,
    trying_mark,
)
from fsdp_magic.panels.tuner_scale import (
    MEMORY_HEIGHT,
    MemoryAxis,
    SizeAxis,
    curve,
    memory_axis,
    size_axis,
)
from fsdp_magic.panels.tuner_view import ProbeView, TunerView

_AXIS = 46
_BY_A_LINE = tuple(
    (down, side)
    for down, first in ((6.0, 8.0), (-18.0, -8.0), (18.0, 8.0), (-30.0, -8.0), (30.0, 8.0))
    for side in (first, -first)
)
"""Where the name of a line may stand: pixels below a point of it, and aside."""


def html(view: TunerView, *, as_image: bool) -> str:
    """Draw the chart.

    Args:
        view: the search.
        as_image: whether it has to survive in a file.
    """
    sizes, memory = size_axis(view), memory_axis(view)
    drawing = svg(view, sizes, memory, label=words(view))
    if as_image:
        style = f"display:block;width:100%;height:{HEIGHT}px;margin:0;max-width:none"
        drawing = image(drawing, alt=words(view), style=style)
    unit = f", {memory.unit.name}" if memory.is_known else ""
    caption = f"peak memory of the fullest rank{unit}"
    return (
        f'<div style="font-size:11px;{NUMBERS}"><div style="height:17px;line-height:14px">'
        f'{muted(caption)} </div><div style="display:flex">{_figures(view, memory)}'
        f'<div style="flex:1 1 0%;min-width:0;position:relative;height:{HEIGHT + 34}px">'
        f"{drawing}{_labels(view, sizes, memory)}{_ticks(view, sizes)}</div></div></div>"
    )


def words(view: TunerView) -> str:
    """Return the picture in words."""
    fit = [f"{p.micro_batch_size:,}" for p in view.probes if p.fits]
    not_fit = [f"{p.micro_batch_size:,}" for p in view.probes if not p.fits]
    said = [
        f"Peak memory and samples per second against the micro-batch size under "
        f"{shortened(view.strategy, 80)}",
        f"fits: {', '.join(fit) or 'none yet'}",
        *([f"does not fit: {', '.join(not_fit)}"] if not_fit else []),
        *([f"found: {view.pick:,}"] if view.pick and view.state == "done" else []),
        *([f"capacity {bytes_text(view.capacity_bytes)}"] if view.capacity_bytes else []),
    ]
    return "; ".join(said)


def pick_text(view: TunerView) -> str:
    """Return the pick with what it takes: ``24: 75.7 GiB (95 %)``."""
    probe = picked(view)
    if probe is None or probe.peak_bytes is None:
        return "" if view.pick is None else f"{view.pick:,}"
    size = bytes_text(probe.peak_bytes)
    if not view.capacity_bytes:
        return f"{view.pick:,}: {size}"
    return f"{view.pick:,}: {size} ({100 * probe.peak_bytes / view.capacity_bytes:.0f} %)"


def picked(view: TunerView) -> ProbeView | None:
    """Return the probe of the pick."""
    fitting = [p for p in view.probes if p.fits and p.micro_batch_size == view.pick]
    return fitting[-1] if fitting else None


# ---------------------------------------------------------------- axes


def _figures(view: TunerView, memory: MemoryAxis) -> str:
    """Return the figures left of the picture: memory above, speed beneath."""
    ends = [(memory.top(count), figure) for count, figure in memory.ticks()]
    if most := fastest(view):
        ends += [(STRIP_TOP, count_text(most)), (HEIGHT, "0")]
    spans = "".join(
        f'<span style="position:absolute;right:6px;top:{top - 7:.1f}px;line-height:14px;'
        f'white-space:nowrap">{figure} </span>'
        for top, figure in ends
    )
    style = f"flex:none;position:relative;width:{_AXIS}px;height:{HEIGHT}px;opacity:.7"
    return f'<div style="{style}">{spans}</div>'


def _ticks(view: TunerView, sizes: SizeAxis) -> str:
    """Return the sizes under the picture, that of the pick strong, and what they are."""
    named = [size for size in (view.pick, view.trying) if size]
    has_sizes = bool(view.probes or view.planned or named)
    figures = "".join(_tick(size, view, sizes) for size in sizes.ticks(named) if has_sizes)
    name = "micro-batch size per rank" + (", logarithmic" if sizes.is_logarithmic else "")
    return (
        f'{figures}<span style="position:absolute;left:0px;width:100%;top:{HEIGHT + 17}px;'
        f'text-align:center;line-height:14px">{muted(name)} </span>'
    )


def _tick(size: int, view: TunerView, sizes: SizeAxis) -> str:
    figure = f"<b>{size:,} </b>" if size == view.pick else muted(f"{size:,} ")
    width = round(text_width(f"{size:,}")) + 6
    return (
        f'<span style="position:absolute;left:{sizes.left(size):.2f}%;width:{width}px;'
        f"margin-left:{-width / 2:g}px;top:{HEIGHT + 2}px;text-align:center;line-height:14px;"
        f'white-space:nowrap">{figure}</span>'
    )


# ---------------------------------------------------------------- words in the picture


def _labels(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> str:
    """Return the words at what they name, where they cover least."""
    line = curve(view, sizes, memory)
    labels = [
        *_limit_labels(view, memory),
        *_pick_label(view, sizes, memory),
        *_trying_label(view, sizes, memory),
        *_line_label(view, line),
        *_probe_labels(view, sizes, memory),
    ]
    now = trying_mark(view, sizes, memory)
    marks = [mark(probe, sizes, memory) for probe in view.probes]
    marks += [now] if now is not None else []
    lines = [*line, *_drop(view, sizes, memory)]
    spans = "".join(
        f'<span style="position:absolute;{spot.style};line-height:{LABEL_HEIGHT}px;'
        f'white-space:nowrap">{_strong(label)} </span>'
        for label, spot in place(labels, marks=marks, lines=lines)
    )
    if not memory.is_known:
        spans = _centred("nothing is measured yet", MEMORY_HEIGHT / 2)
    return spans + _strip_label(view)


def _drop(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> list[Point]:
    """Return points along the line from the pick down to its size."""
    probe = picked(view)
    if probe is None:
        return []
    left, top = mark(probe, sizes, memory)
    return [Point(left, top + down) for down in range(8, int(MEMORY_HEIGHT - top), 6)]


def _strong(label: Label) -> str:
    return f"<b>{escape(label.text)}</b>" if label.is_strong else escape(label.text)


def _limit_labels(view: TunerView, memory: MemoryAxis) -> list[Label]:
    """Return the words for the capacity and the margin beneath it."""
    if view.capacity_bytes is None:
        return []
    capacity = f"{bytes_text(view.capacity_bytes)} capacity"
    if memory.capacity_bytes is None:
        return [Label(f"{capacity}, far above", _sides(1))]
    line = memory.top(memory.capacity_bytes)
    labels = [Label(capacity, _sides(line - LABEL_HEIGHT - 1))]
    if view.margin:
        low = memory.top(memory.capacity_bytes * (1 - view.margin))
        labels.append(Label(f"{100 * view.margin:g} % margin stays free", _sides(low + 1)))
    return labels


def _sides(top: float) -> list[Spot]:
    return [Spot(0.0, top, 4.0), Spot(100.0, top, -4.0)]


def _pick_label(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> list[Label]:
    probe = picked(view)
    if probe is None:
        return []
    at = mark(probe, sizes, memory)
    return [
        Label(
            pick_text(view),
            _beside(at, (4, 18, 32, 46, -30, -18, 60, 74, -44, -58, 88)),
            is_strong=True,
        )
    ]


def _trying_label(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> list[Label]:
    now = trying_mark(view, sizes, memory)
    if now is None:
        return []
    return [Label(f"trying {view.trying:,}", _beside(now, (4, -18, 18, -6, 30, -30, 44)))]


def _probe_labels(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> list[Label]:
    """Return a word at a probe that fits and at one that does not: at one of each kind."""
    labels = []
    kinds = ((False, "does not fit"), (True, "measured"))
    for fits, word in kinds:
        probes = [p for p in view.probes if p.fits is fits and p.micro_batch_size != view.pick]
        if probes:
            spots = [
                spot
                for probe in probes[:8]
                for spot in _beside(mark(probe, sizes, memory), (-6, 8, -20, 20, -34))
            ]
            labels.append(Label(word, spots, is_optional=True))
    return labels


def _beside(at: Point, downs: Sequence[float]) -> list[Spot]:
    """Return spots left and right of a point, so many pixels below it."""
    tops = [min(max(0.0, at.top + down), MEMORY_HEIGHT - LABEL_HEIGHT) for down in downs]
    beside = [Spot(at.left, top, shift) for top in tops for shift in (-11.0, 11.0)]
    return [*beside, *(spot for top in tops for spot in _sides(top))]  # long words at the middle


def _line_label(view: TunerView, line: Sequence[Point]) -> list[Label]:
    if len(line) < 2:
        return []
    word = "predicted" if view.planned else "line through the dots"
    inner = [line[len(line) * part // 8] for part in (4, 5, 3, 6, 2, 7, 1)]
    spots = [
        Spot(at.left, min(max(0.0, at.top + down), MEMORY_HEIGHT - LABEL_HEIGHT), shift)
        for at in inner
        for down, shift in _BY_A_LINE
    ]
    spots += [spot for at in inner for spot in _sides(max(0.0, at.top - 18))]
    return [Label(word, spots)]


def _strip_label(view: TunerView) -> str:
    """Return what the bars beneath are, in the gap above them."""
    known = fastest(view)
    name = "samples/s of all ranks" if known else "samples/s: none measured yet"
    if not known and view.state in ("done", "stopped", "failed"):
        name = "samples/s: none measured"
    if not known:
        return _centred(name, STRIP_TOP + STRIP_HEIGHT / 2 - 7)
    return (
        f'<span style="position:absolute;left:4px;top:{STRIP_TOP - 15}px;line-height:14px">'
        f"{muted(name)} </span>"
    )


def _centred(words: str, top: float) -> str:
    return (
        f'<span style="position:absolute;left:0px;width:100%;top:{top:.0f}px;text-align:center;'
        f'line-height:14px">{muted(words)} </span>'
    )
