"""The part of a panel that shows the memory of all ranks: key, bars, numbers; pure.

What is the same on all ranks (the device, its capacity) stands above them, what no rank knows is
left out. Of many ranks three get a row, and a strip shows all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.core.units import UNKNOWN, bytes_text
from fsdp_magic.panels import many_ranks
from fsdp_magic.panels.activity import ActivityColumns
from fsdp_magic.panels.gauges import (
    PARTS,
    Gauge,
    bar,
    breakdown,
    capacity_text,
    full_bytes,
    legend,
    letters,
    measured,
    scale_text,
    unit_of,
    warning,
)
from fsdp_magic.panels.parts import (
    FIRST,
    SMALL,
    MemoryUnit,
    cell,
    escape,
    head_cell,
    hidden,
    icon,
    muted,
    number_cell,
    row,
    shortened,
    table,
    text_table,
)

_TICK_KEY = (
    ' <span style="display:inline-block;height:9px;border-left:2px solid;margin-left:2px"></span>'
)


def html(gauges: Sequence[Gauge], *, at_peak: bool) -> str:
    """Return heading, key and bars; of many ranks three bars and a strip.

    Args:
        gauges: every rank, in order.
        at_peak: whether they show the moment of the peak and the mean activity.
    """
    if not gauges:
        return ""
    gauges = measured(gauges)
    # The devices take what room is left, so that no name, however long, adds a line.
    rest = f"flex:1 1 60px;min-width:0;overflow:hidden;text-overflow:ellipsis;{SMALL}"
    devices = escape(_devices(gauges))
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:0px 14px;'
        f'margin:6px 0px 2px 0px"><b>Memory, {unit_of(gauges).name} </b>{legend()}'
        f'<span title="{devices}" style="{rest};text-align:right;white-space:nowrap">{devices}'
        "</span></div>"
        + _table(gauges, _Columns.of(gauges, at_peak=at_peak))
        + many_ranks.strip_html(gauges)
    )


def text(gauges: Sequence[Gauge], *, at_peak: bool) -> list[str]:
    """Return the same as lines of text; see ``html``."""
    if not gauges:
        return []
    gauges = measured(gauges)
    lines = _lines(gauges, _Columns.of(gauges, at_peak=at_peak))
    return [*lines, *many_ranks.strip_text(gauges)]


def _table(gauges: Sequence[Gauge], columns: _Columns) -> str:
    """Return a table with a bar and the numbers of each rank that gets a row."""
    unit, largest = columns.unit, full_bytes(gauges)
    rows = [
        row(
            cell(many_ranks.label_html(label), style=FIRST)
            + (cell(muted(escape(_name(gauge)))) if columns.names else "")
            + cell(bar(gauge, unit=unit, largest=largest), style="width:100%")
            + "".join(number_cell(value) for value in columns.numbers_html(gauge))
        )
        for gauge, label in many_ranks.shown(gauges)
    ]
    head = (
        head_cell("rank", style=FIRST)
        + (head_cell("device") if columns.names else "")
        + head_cell(hidden("memory") + scale_text(gauges))
        + "".join(
            head_cell(name + _TICK_KEY * (name == "peak used"), right=True)
            for name in columns.heads
        )
    )
    return table(head, rows)


def _devices(gauges: Sequence[Gauge]) -> str:
    """Return what the ranks run on: ``capacity 80.0 GiB · 8 × NVIDIA H100``.

    The capacity first: on a narrow page the end is cut off.
    """
    names = {shortened(gauge.device_name) for gauge in gauges}
    ranks = f"{len(gauges)} rank{'s' if len(gauges) != 1 else ''}"
    devices = f"{len(gauges)} × {names.pop()}" if len(names) == 1 and "" not in names else ranks
    capacities = {gauge.capacity_bytes for gauge in gauges}
    capacity = capacities.pop() if len(capacities) == 1 else None
    return devices if capacity is None else f"capacity {bytes_text(capacity)} · {devices}"


def _name(gauge: Gauge) -> str:
    return shortened(gauge.device_name, 24) or UNKNOWN


def _lines(gauges: Sequence[Gauge], columns: _Columns) -> list[str]:
    """Return the same as lines of text; see ``_table``."""
    largest = full_bytes(gauges)
    device = ["device"] if columns.names else []
    scale = scale_text(gauges)
    memory = f"memory, {columns.unit.name}" + (f", {scale}" if scale else "")
    heads = [f"{name} |" if name == "peak used" else name for name in columns.heads]
    rows = [["rank", *device, memory, *heads]]
    for gauge, label in many_ranks.shown(gauges):
        drawn = f"[{letters(gauge, largest=largest)}]"
        name = [_name(gauge)] if columns.names else []
        rows.append([label, *name, drawn, *columns.numbers(gauge)])
    key = "  ".join(f"{part.letter} {part.name}" for part in PARTS)
    fullest = max(gauges, key=lambda gauge: gauge.highest_bytes)
    moment = f"rank {fullest.rank}: {breakdown(fullest, columns.unit)}"
    return [_devices(gauges), *text_table(rows, left=2 + len(device)), key, moment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Which columns a table of gauges has: what no rank knows gets none."""

    unit: MemoryUnit
    at_peak: bool
    names: bool
    capacity: bool
    activity: ActivityColumns

    @classmethod
    def of(cls, gauges: Sequence[Gauge], *, at_peak: bool) -> _Columns:
        """Return the columns that some ranks need."""
        return cls(
            unit=unit_of(gauges),
            at_peak=at_peak,
            names=len({gauge.device_name for gauge in gauges}) > 1,
            capacity=len({gauge.capacity_bytes for gauge in gauges}) > 1,
            activity=ActivityColumns.of([gauge.activity for gauge in gauges]),
        )

    @property
    def heads(self) -> list[str]:
        """Headings of the columns of numbers."""
        heads = ["used at peak"] if self.at_peak else ["used", "peak used"]
        heads += ["capacity"] if self.capacity else []
        return [*heads, *self.activity.heads(mean="mean " if self.at_peak else "")]

    def numbers(self, gauge: Gauge) -> list[str]:
        """Return the numbers of a rank, as text."""
        sizes = [gauge.used_bytes] if self.at_peak else [gauge.used_bytes, gauge.peak_bytes]
        values = [self.unit.text(size) for size in sizes]
        values += [capacity_text(gauge.capacity_bytes, self.unit)] if self.capacity else []
        return [*values, *self.activity.values(gauge.activity)]

    def numbers_html(self, gauge: Gauge) -> list[str]:
        """Return the numbers of a rank, as HTML; the peak carries the warning."""
        values = self.numbers(gauge)
        sign, colour, sentence = warning(gauge)
        peak = 0 if self.at_peak else 1
        mark = f'<span title="{sentence}">{icon(sign, colour)}</span> ' if sign else ""
        values[0] = f"<b>{values[0]}</b>"
        values[peak] = mark + values[peak]
        return values
