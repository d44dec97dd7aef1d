"""One training cell under several strategies: losses, time, memory by parts; pure.

A row is a strategy. Its memory is that of the rank that held most, at the moment of its peak, cut
into parts on one scale for all rows; its time is a bar on one scale too. A strategy that could
not run has its reason in place of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.core.units import UNKNOWN, bytes_text
from fsdp_magic.panels.gauges import (
    PARTS,
    Gauge,
    bar,
    breakdown,
    full_bytes,
    legend,
    letters,
    unit_of,
)
from fsdp_magic.panels.parts import (
    BLUE,
    FIRST,
    ORANGE,
    TRACK,
    MemoryUnit,
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

_SHOWN_PARTS = PARTS[:4]
_TIME_WIDTH = 12


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
    gauges = _gauges(view)
    head = (
        head_cell("strategy", style=FIRST)
        + head_cell("ms/step", right=True)
        + head_cell(hidden("time"))
        + head_cell("samples/s", right=True)
        + head_cell("last loss", right=True)
        + head_cell("loss differs by", right=True)
        + head_cell(f"peak, {_unit(gauges).name}", right=True)
        + head_cell(f"on the fullest rank, full bar {bytes_text(full_bytes(gauges))}")
    )
    content = (
        headline("Strategies compared", summary=_summary(view), stamp=view.stamp)
        + f"<div>{legend(_SHOWN_PARTS)}</div>"
        + table(head, [_row_html(each, view, gauges) for each in view.rows])
        + (f"<div>{muted(escape(_pending(view)))}</div>" if view.pending else "")
        + notes_html(view.notes)
    )
    return card(content, label="Comparison of strategies")


def text(view: ComparisonView) -> str:
    """Return the same as text."""
    gauges = _gauges(view)
    unit, largest = _unit(gauges), full_bytes(gauges)
    heads = ["strategy", "ms/step", "samples/s", "last loss", "loss differs by"]
    rows = [[*heads, f"peak, {unit.name}", f"memory, full bar {bytes_text(largest)}"]]
    for each in view.rows:
        if each.failure:
            continue
        gauge = _gauge(each)
        rows.append(
            [
                _label(each),
                *_numbers(each),
                unit.text(_peak(each)),
                f"[{letters(gauge, largest=largest)}]",
            ]
        )
    lines = [f"Strategies compared  {_summary(view)}  {shortened(view.stamp, 20)}"]
    lines += text_table(rows) if len(rows) > 1 else []
    lines += [f"{_label(e)}: {shortened(e.failure, 300)}" for e in view.rows if e.failure]
    lines += ["  ".join(f"{part.letter} {part.name}" for part in _SHOWN_PARTS)]
    lines += [f"{_label(e)}: {breakdown(_gauge(e), unit)}" for e in view.rows if not e.failure]
    lines += [_pending(view)] if view.pending else []
    return "\n".join([*lines, *notes_text(view.notes)])


def _row_html(each: ComparedView, view: ComparisonView, gauges: Sequence[Gauge]) -> str:
    name = cell(escape(_label(each)), style=FIRST)
    if each.failure:
        sign = icon("▲", ORANGE)
        reason = f'<td colspan="7" style="border:0;padding:1px 0 1px 10px">{sign} '
        return row(f"{name}{reason}{escape(shortened(each.failure, 300))}</td>")
    ms, samples, loss, difference = _numbers(each)
    unit = _unit(gauges)
    drawn = bar(_gauge(each), unit=unit, largest=full_bytes(gauges))
    return row(
        name
        + number_cell(ms)
        + cell(_time_bar(each, view), style="min-width:60px")
        + number_cell(samples)
        + number_cell(loss)
        + number_cell(difference)
        + number_cell(unit.text(_peak(each)), style="padding-left:14px")
        + cell(drawn, style="width:100%;min-width:140px")
    )


def _time_bar(each: ComparedView, view: ComparisonView) -> str:
    longest = max((r.seconds_per_step or 0.0 for r in view.rows), default=0.0)
    part = 100 * (each.seconds_per_step or 0.0) / longest if longest else 0.0
    return (
        f'<div style="width:60px;height:8px;background:{TRACK};border-radius:3px;overflow:hidden">'
        f'<div style="width:{part:.1f}%;height:8px;background:{BLUE}"></div></div>'
    )


def _numbers(each: ComparedView) -> tuple[str, str, str, str]:
    """Return time, rate, loss and difference as text."""
    ms = UNKNOWN if each.seconds_per_step is None else f"{1000 * each.seconds_per_step:,.1f}"
    rate = each.samples_per_second
    samples = UNKNOWN if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
    loss = figure_text(each.losses[-1] if each.losses else None)
    difference = UNKNOWN if each.difference is None else f"{each.difference:.0e}"
    return ms, samples, loss, "0" if each.difference == 0 else difference


def _summary(view: ComparisonView) -> str:
    many = "s" if view.ranks != 1 else ""
    return (
        f"the last training cell, {view.steps} steps after {view.warm_up} to warm up, on "
        f"{view.ranks} rank{many}, each from the same weights"
    )


def _pending(view: ComparisonView) -> str:
    return f"to come: {shortened(', '.join(view.pending), 300)}"


def _label(each: ComparedView) -> str:
    name = shortened(each.name, 80)
    return f"{name} (as now)" if each.is_present else name


def _peak(each: ComparedView) -> int | None:
    return max((peak for peak in each.peak_bytes if peak is not None), default=None)


def _gauges(view: ComparisonView) -> list[Gauge]:
    return [_gauge(each) for each in view.rows if not each.failure]


def _gauge(each: ComparedView) -> Gauge:
    """Return the bar of a strategy: what tensors held, not what the allocator kept beside it."""
    memory = each.memory
    if memory is not None:
        held = memory.allocated_bytes
        memory = replace(memory, reserved_bytes=held, used_bytes=held, capacity_bytes=None)
    return Gauge(rank=0, device_name="", memory=memory, peak_bytes=None, magnified=True)


def _unit(gauges: Sequence[Gauge]) -> MemoryUnit:
    return unit_of(gauges)
