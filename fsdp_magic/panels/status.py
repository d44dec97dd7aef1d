"""Every rank of a session: where it runs, how full it is, what it holds; pure."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.core.telemetry import RankStatus
from fsdp_magic.core.units import MIB, UNKNOWN
from fsdp_magic.panels.gauges import (
    Gauge,
    bar,
    capacity_text,
    full_bytes,
    legend,
    letters,
    measured,
    scale_text,
    unit_of,
)
from fsdp_magic.panels.parts import (
    FIRST,
    SMALL,
    MemoryUnit,
    card,
    cell,
    escape,
    head_cell,
    number_cell,
    one_line,
    row,
    table,
    text_table,
)

_SIZES = ("used", "peak allocated", "capacity")


def html(ranks: Sequence[RankStatus], *, stamp: str, heading: str = "") -> str:
    """Return a row for each rank.

    Args:
        ranks: in order.
        stamp: when they were asked, as text.
        heading: text above; without it the number of ranks.
    """
    gauges = measured([_gauge(rank) for rank in ranks])
    unit, largest = unit_of(gauges), full_bytes(gauges)
    rows = [
        row(_place_cells(rank) + _memory_cells(rank, gauge, unit, largest) + _work_cells(rank))
        for rank, gauge in zip(ranks, gauges, strict=True)
    ]
    head = (
        head_cell("rank", style=FIRST)
        + "".join(head_cell(name) for name in ("host", "pid", "device", "name"))
        + head_cell(_memory_head(gauges, unit))
        + "".join(head_cell(name, right=True) for name in _SIZES)
        + head_cell("models")
        + head_cell("steps", right=True)
    )
    content = (
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0px 16px;'
        f'margin-bottom:4px"><b>{escape(one_line(heading) or _count(ranks))} </b>'
        f'<span style="{SMALL}">{escape(stamp)} </span></div>'
        + (f'<div style="margin-bottom:4px">{legend()}</div>' if _is_used(gauges) else "")
        + table(head, rows)
    )
    return card(content, label="Session status")


def text(ranks: Sequence[RankStatus], *, stamp: str, heading: str = "") -> str:
    """Return the same as text; see ``html``."""
    gauges = measured([_gauge(rank) for rank in ranks])
    unit, largest = unit_of(gauges), full_bytes(gauges)
    place_heads = ["rank", "host", "pid", "device", "name"]
    lines = [[*place_heads, _memory_head(gauges, unit), "models", *_SIZES, "steps"]]
    for rank, gauge in zip(ranks, gauges, strict=True):
        place = [str(rank.rank), one_line(rank.host), str(rank.pid), one_line(rank.device)]
        drawn = f"[{letters(gauge, largest=largest, width=16)}]"
        held = [one_line(rank.device_name) or UNKNOWN, drawn, _models(rank)]
        lines.append([*place, *held, *_sizes(rank, unit), f"{rank.steps:,}"])
    return "\n".join(
        [f"{one_line(heading) or _count(ranks)}  {one_line(stamp)}", *text_table(lines, left=7)]
    )


def _gauge(rank: RankStatus) -> Gauge:
    return Gauge(
        rank=rank.rank,
        device_name=rank.device_name,
        memory=rank.memory,
        peak_bytes=None,
        activity=rank.activity,
    )


def _is_used(gauges: Sequence[Gauge]) -> bool:
    """Return whether there is anything to see in the bars."""
    return any(gauge.highest_bytes >= MIB for gauge in gauges)


def _memory_head(gauges: Sequence[Gauge], unit: MemoryUnit) -> str:
    scale = scale_text(gauges) if _is_used(gauges) else ""
    return f"memory, {unit.name}" + (f", {scale}" if scale else "")


def _count(ranks: Sequence[RankStatus]) -> str:
    return f"{len(ranks)} rank{'s' if len(ranks) != 1 else ''}"


def _models(rank: RankStatus) -> str:
    return ", ".join(one_line(model) for model in rank.models) or "–"


def _sizes(rank: RankStatus, unit: MemoryUnit) -> list[str]:
    memory = rank.memory
    sizes = [unit.text(size) for size in (memory.used_bytes, memory.peak_allocated_bytes)]
    return [*sizes, capacity_text(memory.capacity_bytes, unit)]


def _place_cells(rank: RankStatus) -> str:
    name = escape(one_line(rank.device_name) or UNKNOWN)
    return (
        cell(f"<b>{rank.rank}</b>", style=FIRST)
        + cell(escape(one_line(rank.host)))
        + cell(str(rank.pid))
        + cell(escape(one_line(rank.device)))
        + cell(name, style="max-width:170px;overflow:hidden;text-overflow:ellipsis", title=name)
    )


def _memory_cells(rank: RankStatus, gauge: Gauge, unit: MemoryUnit, largest: int) -> str:
    drawn = cell(bar(gauge, unit=unit, largest=largest), style="width:100%")
    return drawn + "".join(number_cell(size) for size in _sizes(rank, unit))


def _work_cells(rank: RankStatus) -> str:
    return cell(escape(_models(rank))) + number_cell(f"{rank.steps:,}")
