"""One training cell under several strategies: losses, time, memory by parts; pure.

First a table of numbers, a row a strategy, with its time as a bar; one that could not run has its
reason in place of numbers. Then the memory of each: that of the rank that held most, at the
moment of its peak, cut into parts on one scale. On a narrow page names go on in the next line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.core.units import UNKNOWN, bytes_text
from fsdp_magic.panels.gauges import (
    PARTS,
    Gauge,
    Part,
    bar,
    breakdown,
    full_bytes,
    legend,
    letters,
    parts_of,
    unit_of,
)
from fsdp_magic.panels.parts import (
    BLUE,
    FIRST,
    ORANGE,
    TRACK,
    card,
    cell,
    escape,
    figure_text,
    head_cell,
    headline,
    hidden,
    icon,
    muted,
    notes_html,
    notes_text,
    number_cell,
    row,
    shortened,
    table,
    text_table,
)

_HEADS = ("strategy", "ms/step", "samples/s", "last loss", "loss differs by")
_WRAPS = "white-space:normal;"
_REFERENCE = "reference"
_LONG_NAME = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedView:
    """One strategy as it is shown.

    Attributes:
        name: of the strategy, with what it adds.
        is_present: whether the models are spread so.
        losses: of every step.
        difference: the largest relative one from the losses of the first row that has any.
        seconds_per_step: None: not measured.
        samples_per_second: None: not measured.
        memory: of the rank with the highest peak, at that moment; None: not measured.
        peak_bytes: of every rank.
        failure: why there is nothing; empty: there is.
    """

    name: str
    is_present: bool = False
    losses: tuple[float, ...] = ()
    difference: float | None = None
    seconds_per_step: float | None = None
    samples_per_second: float | None = None
    memory: MemorySample | None = None
    peak_bytes: tuple[int | None, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonView:
    """A comparison as it is shown.

    Attributes:
        rows: the strategies, in the order in which they ran.
        pending: names of those that have not run yet.
        steps: that were measured of each.
        warm_up: steps before those.
        ranks: in the world.
        stamp: when it was drawn, as text.
        notes: sentences a person should read.
    """

    rows: Sequence[ComparedView]
    pending: Sequence[str]
    steps: int
    warm_up: int
    ranks: int
    stamp: str
    notes: Sequence[str] = ()


def html(view: ComparisonView) -> str:
    """Return it as HTML."""
    content = (
        headline("Strategies compared", summary=_summary(view), stamp=view.stamp)
        + table(_head_html(), [_row_html(each, view) for each in view.rows])
        + _memory_html(view)
        + (_pending_html(view) if view.pending else "")
        + notes_html(view.notes)
    )
    return card(content, label="Comparison of strategies")


def text(view: ComparisonView) -> str:
    """Return the same as text."""
    ran = _ran(view)
    rows = [[_label(each), *_numbers(each, view)] for each in ran]
    lines = [f"Strategies compared  {_summary(view)}  {shortened(view.stamp, 20)}"]
    lines += text_table([list(_HEADS), *rows]) if rows else []
    lines += [f"{_label(e)}: {shortened(e.failure, 300)}" for e in view.rows if e.failure]
    lines += _memory_text(view) if ran else []
    lines += [_pending(view)] if view.pending else []
    return "\n".join([*lines, *notes_text(view.notes)])


# ---------------------------------------------------------------- time and losses


def _head_html() -> str:
    name, time, *numbers = _HEADS
    return (
        head_cell(name, style=FIRST)
        + head_cell(_wrapping(time), right=True, style=_WRAPS)
        + head_cell(hidden("time"))
        + "".join(head_cell(_wrapping(each), right=True, style=_WRAPS) for each in numbers)
    )


def _row_html(each: ComparedView, view: ComparisonView) -> str:
    name = cell(_label_html(each), style=FIRST + _WRAPS)
    if each.failure:
        sign = icon("▲", ORANGE)
        reason = escape(shortened(each.failure, 300))
        style = "border:0;padding:1px 0 1px 10px;text-align:left;line-height:16px"
        return row(f'{name}<td colspan="5" style="{style}">{sign} {reason}</td>')
    ms, *numbers = _numbers(each, view)
    drawn = cell(_time_bar(each, view), style="width:25%")
    return row(name + number_cell(ms) + drawn + "".join(map(number_cell, numbers)))


def _time_bar(each: ComparedView, view: ComparisonView) -> str:
    longest = max((r.seconds_per_step or 0.0 for r in view.rows), default=0.0)
    part = 100 * (each.seconds_per_step or 0.0) / longest if longest else 0.0
    return (
        f'<div style="min-width:20px;height:8px;background:{TRACK};border-radius:3px;'
        f'overflow:hidden"><div style="width:{part:.1f}%;height:8px;background:{BLUE}"></div></div>'
    )


def _numbers(each: ComparedView, view: ComparisonView) -> tuple[str, str, str, str]:
    """Return time, rate, loss and difference as text."""
    ms = _milliseconds(each.seconds_per_step)
    rate = each.samples_per_second
    samples = UNKNOWN if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
    loss = figure_text(each.losses[-1] if each.losses else None)
    difference = UNKNOWN if each.difference is None else f"{each.difference:.0e}"
    if each is next((other for other in view.rows if other.losses), None):
        return ms, samples, loss, _REFERENCE
    return ms, samples, loss, "0" if each.difference == 0 else difference


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{1000 * seconds:.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"


# ---------------------------------------------------------------- memory


def _memory_html(view: ComparisonView) -> str:
    """Return the memory of each strategy as a bar; the fullest rank's, at its peak."""
    ran = _ran(view)
    if not ran:
        return ""
    gauges = [_gauge(each) for each in ran]
    unit, largest = unit_of(gauges), full_bytes(gauges)
    rows = [
        row(
            cell(_label_html(each), style=FIRST + _WRAPS)
            + cell(bar(gauge, unit=unit, largest=largest), style="width:70%;min-width:110px")
            + number_cell(f"<b>{unit.text(_peak(each))}</b>")
        )
        for each, gauge in zip(ran, gauges, strict=True)
    ]
    head = (
        head_cell("strategy", style=FIRST)
        + head_cell(f"full bar {bytes_text(largest)}")
        + head_cell("peak", right=True)
    )
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:0px 14px;'
        f'margin:8px 0px 2px 0px"><b>Memory of the fullest rank, {unit.name} </b>'
        f"{legend(_parts(gauges))}</div>{table(head, rows)}"
    )


def _memory_text(view: ComparisonView) -> list[str]:
    """Return the same as lines of text; see ``_memory_html``."""
    ran = _ran(view)
    gauges = [_gauge(each) for each in ran]
    unit, largest = unit_of(gauges), full_bytes(gauges)
    rows = [["memory of the fullest rank", f"full bar {bytes_text(largest)}", f"peak, {unit.name}"]]
    for each, gauge in zip(ran, gauges, strict=True):
        drawn = f"[{letters(gauge, largest=largest)}]"
        rows.append([_label(each), drawn, unit.text(_peak(each))])
    key = "  ".join(f"{part.letter} {part.name}" for part in _parts(gauges))
    moments = [
        f"{_label(each)}: {breakdown(gauge, unit)}" for each, gauge in zip(ran, gauges, strict=True)
    ]
    return [*text_table(rows, left=2), key, *moments]


def _parts(gauges: Sequence[Gauge]) -> list[Part]:
    """Return the parts that some bar has."""
    sizes = [parts_of(gauge.memory) for gauge in gauges if gauge.memory is not None]
    return [part for number, part in enumerate(PARTS) if any(each[number] for each in sizes)]


def _peak(each: ComparedView) -> int | None:
    return max((peak for peak in each.peak_bytes if peak is not None), default=None)


def _gauge(each: ComparedView) -> Gauge:
    """Return the bar of a strategy: what tensors held, not what the allocator kept beside it."""
    memory = each.memory
    if memory is not None:
        held = memory.allocated_bytes
        memory = replace(memory, reserved_bytes=held, used_bytes=held, capacity_bytes=None)
    peak = _peak(each)
    rank = 0 if peak is None else each.peak_bytes.index(peak)
    return Gauge(rank=rank, device_name="", memory=memory, peak_bytes=None, magnified=True)


# ---------------------------------------------------------------- words


def _ran(view: ComparisonView) -> list[ComparedView]:
    return [each for each in view.rows if not each.failure]


def _summary(view: ComparisonView) -> str:
    steps = f"{view.steps} step{'s' if view.steps != 1 else ''}"
    ranks = f"{view.ranks} rank{'s' if view.ranks != 1 else ''}"
    return (
        f"the last training cell, {steps} after {view.warm_up} to warm up, on {ranks}, each from "
        "the same weights"
    )


def _pending_html(view: ComparisonView) -> str:
    return f'<div style="overflow-wrap:anywhere">{muted(escape(_pending(view)))}</div>'


def _pending(view: ComparisonView) -> str:
    return f"to come: {shortened(', '.join(view.pending), 300)}"


def _label(each: ComparedView) -> str:
    name = shortened(each.name, 80)
    return f"{name} (as now)" if each.is_present else name


def _label_html(each: ComparedView) -> str:
    """Return the label as HTML, of which a long one may go on in the next line."""
    label = escape(_label(each))
    return label if len(each.name) < _LONG_NAME else _wrapping(label)


def _wrapping(content: str) -> str:
    """Return HTML without tags that may go on in the next line at a sign in it."""
    for sign in "+_":
        content = content.replace(sign, f"{sign}<wbr>")
    return content.replace("/", "<wbr>/")
