"""Memory of one rank over two steps, with phases beneath and the peak taken apart; pure.

Left the picture, right the peak as a column on the same scale, each part of it named where it is:
that column is the key to the colours. On a narrow page it goes on in the next line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsdp_magic.core.planning.ledger import Phase
from fsdp_magic.core.planning.timeline import Timeline
from fsdp_magic.core.units import bytes_text
from fsdp_magic.panels.memory_kinds import MEMORY_KINDS, MemoryKind, drawn, swatch
from fsdp_magic.panels.parts import (
    MemoryUnit,
    escape,
    image,
    memory_unit,
    muted,
    shortened,
    spark,
)
from fsdp_magic.panels.plan_view import PlanView
from fsdp_magic.panels.timeline_picture import HEIGHT, left_of, svg

_AXIS = 46
_LABEL_HEIGHT = 17
_HEADROOM = 1.1
_FAR = 3
"""A limit this many times above the peak is not drawn, or the peak would be flat."""
_NARROW, _NARROWEST = 9.0, 4.5
"""A phase this narrow, in percent of the width, has a short name; its whole one in a tooltip."""
_LONG_NAME = 15
_SEEN = 1 / 200
"""A part below this share of the peak is not seen in it."""
_SHORT = {"optimizer": "opt.", "backward": "bwd", "forward": "fwd"}


class _Span(NamedTuple):
    """A stretch of the picture: from where to where, in percent of the width, and its name."""

    left: float
    right: float
    name: str


def html(view: PlanView) -> str:
    """Return the timeline of the strategy that is shown; nothing, if none is."""
    timeline = view.timeline
    if timeline is None or not timeline.points:
        return ""
    unit, top = _unit(timeline), _top(view)
    picture = image(
        svg(timeline, top_bytes=top, limit_bytes=_limit(view)),
        alt=_words(view),
        style=f"display:block;width:100%;height:{HEIGHT}px;margin:0;max-width:none",
    )
    left = (
        f'<div style="flex:1 1 300px;min-width:0;display:flex">{_axis(top, unit)}'
        f'<div style="flex:1 1 0%;min-width:0"><div style="position:relative;height:{HEIGHT}px">'
        f"{picture}{_limit_label(view, top)}{_peak_label(timeline)}</div>"
        f"{_row(_phases(timeline))}{_row(_steps(timeline), is_muted=True)}</div></div>"
    )
    right = f'<div style="flex:0 0 210px;height:{HEIGHT}px">{_column(view, top, unit)}</div>'
    return (
        f'<div style="margin:12px 0px 9px 0px">{_title(view)}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:10px 12px;font-size:11px">{left}{right}</div>'
    )


def text(view: PlanView) -> list[str]:
    """Return the same as lines of text."""
    timeline = view.timeline
    if timeline is None or not timeline.points:
        return []
    totals = [point.total for point in timeline.points]
    width = 60
    columns = [
        max(totals[n * len(totals) // width : max(n + 1, (n + 1) * len(totals) // width)] or [0.0])
        for n in range(min(width, len(totals)))
    ]
    unit = _unit(timeline)
    sizes = drawn(timeline.held(timeline.peak))
    parts = [
        f"{kind.name} {unit.text(size)}"
        for kind, size in zip(MEMORY_KINDS, sizes, strict=True)
        if size
    ]
    return [
        _words(view),
        f"two steps {spark([0.0, *columns])[1:]}",
        f"at the peak {', '.join(parts)} {unit.name}",
    ]


# ---------------------------------------------------------------- words


def strategy_html(name: str) -> str:
    """Return the name of a strategy as HTML that may go on in the next line at a sign in it."""
    content = escape(shortened(name, 80))
    if len(name) < _LONG_NAME:
        return content
    for sign in "+_":
        content = content.replace(sign, f"{sign}<wbr>")
    return content


def _title(view: PlanView) -> str:
    timeline = view.timeline
    assert timeline is not None
    name = strategy_html(timeline.strategy)
    size = f"micro-batch {timeline.micro_batch_size:,}"
    peak = f"peak {bytes_text(timeline.peak_bytes)} in {timeline.peak_phase}"
    order = "one rank over two steps, in order of allocation"
    return f"<b>{name}, {size} </b> {muted(escape(f'{peak}; {order}'))}"


def _words(view: PlanView) -> str:
    """Return the picture in words."""
    timeline = view.timeline
    assert timeline is not None
    return (
        f"{shortened(timeline.strategy, 80)}, micro-batch {timeline.micro_batch_size:,}: memory of "
        f"a rank over two steps, peak {bytes_text(timeline.peak_bytes)} in {timeline.peak_phase}, "
        f"{bytes_text(view.usable_bytes)} usable"
    )


def _limit_label(view: PlanView, top: float) -> str:
    limit = _limit(view)
    words = f"{bytes_text(view.usable_bytes)} usable"
    if limit is None:
        place, words = "top:1px", f"{words}, far above"
    else:
        # Below the line where there is no room above it.
        above = 100 * (1 - limit / top)
        place = f"top:{above:.2f}%"
        place += ";margin-top:-16px" if above * HEIGHT > 1600 else ";margin-top:1px"
    return f'<span style="position:absolute;left:4px;{place};line-height:15px">{words} </span>'


def _peak_label(timeline: Timeline) -> str:
    """Return the word at the top of the line through the peak."""
    left = left_of(timeline.points[timeline.peak].entry, timeline)
    side = f"left:{left:.2f}%;margin-left:4px"
    if left > 80:
        side = f"right:{100 - left:.2f}%;margin-right:4px"
    return f'<span style="position:absolute;{side};top:1px;line-height:15px"><b>peak </b></span>'


# ---------------------------------------------------------------- axes


def _axis(top: float, unit: MemoryUnit) -> str:
    """Return the figures left of the picture, at its four lines."""
    lines = "".join(
        f'<span style="position:absolute;right:6px;top:{25 * n}%;margin-top:-7px;'
        f'line-height:14px;white-space:nowrap">{top * (4 - n) / 4 / unit.size:,.4g} '
        f"{unit.name if not n else ''} </span>"
        for n in range(5)
    )
    style = f"flex:none;position:relative;width:{_AXIS}px;height:{HEIGHT}px;opacity:.7"
    return f'<div style="{style};font-variant-numeric:tabular-nums">{lines}</div>'


def _row(spans: Sequence[_Span], *, is_muted: bool = False) -> str:
    """Return names beneath the stretches that they are of."""
    look = "opacity:.7;" if is_muted else "border-left:1px solid rgba(128,128,128,.6);"
    boxes = "".join(
        f'<span title="{escape(span.name)}" style="position:absolute;left:{span.left:.2f}%;'
        f"width:{span.right - span.left:.2f}%;box-sizing:border-box;padding-left:3px;{look}"
        f'overflow:hidden;text-overflow:ellipsis;white-space:nowrap">'
        f"{escape(_fitting(span)) or '&nbsp;'} </span>"
        for span in spans
    )
    return f'<div style="position:relative;height:16px;line-height:16px">{boxes}</div>'


def _fitting(span: _Span) -> str:
    """Return the name of a span as far as it has room."""
    width = span.right - span.left
    return span.name if width > _NARROW else _SHORT.get(span.name, "") * (width > _NARROWEST)


def _phases(timeline: Timeline) -> list[_Span]:
    """Return the stretches of phases, named without their step."""
    spans = _spans([Phase(p.entry, p.name.partition(": ")[2] or p.name) for p in timeline.phases])
    ends = [*(start for start, _ in spans[1:]), timeline.entries - 1]
    return [
        _Span(left_of(start, timeline), left_of(end, timeline), name)
        for (start, name), end in zip(spans, ends, strict=True)
    ]


def _steps(timeline: Timeline) -> list[_Span]:
    """Return the stretches of steps."""
    spans = _spans([Phase(p.entry, p.name.partition(":")[0]) for p in timeline.phases])
    ends = [*(start for start, _ in spans[1:]), timeline.entries - 1]
    words = {"step 1": "first step", "step 2": "every later step"}
    return [
        _Span(left_of(start, timeline), left_of(end, timeline), words.get(name, name))
        for (start, name), end in zip(spans, ends, strict=True)
    ]


def _spans(phases: Sequence[Phase]) -> list[Phase]:
    """Return phases without those that go on what is before them."""
    return [
        phase
        for number, phase in enumerate(phases)
        if not number or phases[number - 1].name != phase.name
    ]


# ---------------------------------------------------------------- the peak, taken apart


def _column(view: PlanView, top: float, unit: MemoryUnit) -> str:
    """Return the peak as a column with a name beside each part, from the top down."""
    timeline = view.timeline
    assert timeline is not None
    sizes = drawn(timeline.held(timeline.peak))
    total = sum(sizes)
    named = [each for each in zip(MEMORY_KINDS, sizes, strict=True) if each[1] > _SEEN * total]
    parts = named[::-1]
    ground, boxes, middles = HEIGHT * (1 - total / top), "", []
    for kind, size in parts:
        height = HEIGHT * size / top
        boxes += (
            f'<span style="position:absolute;left:0px;width:14px;top:{ground:.1f}px;'
            f'height:{max(height, 0.5):.1f}px;{kind.style}"></span>'
        )
        middles.append(ground + height / 2)
        ground += height
    labels = "".join(
        _label(kind, size, total, place, unit)
        for (kind, size), place in zip(parts, _apart(middles), strict=True)
    )
    caption = (
        f'<span style="position:absolute;left:0px;top:{HEIGHT * (1 - total / top) - 20:.1f}px;'
        f'line-height:15px;white-space:nowrap"><b>at the peak {unit.text(total)} </b></span>'
    )
    return f'<div style="position:relative;height:{HEIGHT}px">{boxes}{caption}{labels}</div>'


def _label(kind: MemoryKind, size: float, total: float, top: float, unit: MemoryUnit) -> str:
    share = f"{100 * size / total:.0f}&nbsp;%"
    return (
        f'<span style="position:absolute;left:20px;top:{top:.1f}px;white-space:nowrap;'
        f'line-height:{_LABEL_HEIGHT}px">{swatch(kind)} {kind.name} <b>{unit.text(size)} </b>'
        f"{muted(share)} </span>"
    )


def _apart(middles: Sequence[float]) -> list[float]:
    """Return where labels begin, near what they name and none over another."""
    tops: list[float] = []
    for middle in middles:
        least = tops[-1] + _LABEL_HEIGHT if tops else 0.0
        tops.append(max(least, middle - _LABEL_HEIGHT / 2))
    limit = float(HEIGHT)
    for number in range(len(tops) - 1, -1, -1):
        limit -= _LABEL_HEIGHT
        tops[number] = min(tops[number], limit)
        limit = tops[number]
    return tops


# ---------------------------------------------------------------- scale


def _limit(view: PlanView) -> float | None:
    """Return where the limit is drawn; None: too far above to be."""
    timeline = view.timeline
    assert timeline is not None
    return view.usable_bytes if view.usable_bytes < _FAR * timeline.peak_bytes else None


def _top(view: PlanView) -> float:
    """Return the bytes at the top of the picture: whole units, above peak and limit."""
    timeline = view.timeline
    assert timeline is not None
    highest = _HEADROOM * max(timeline.peak_bytes, _limit(view) or 0)
    unit = _unit(timeline)
    step = 4 * unit.size * (1 if highest > 8 * unit.size else 0.25)
    return step * -(-highest // step)


def _unit(timeline: Timeline) -> MemoryUnit:
    return memory_unit([timeline.peak_bytes])
