"""The part of a panel that shows the memory of all ranks: key, bars, numbers; pure.

A column that no rank has a value for is left out. From ``MANY_RANKS`` on a row per rank is too
much to take in: the fullest, the median and the emptiest get a row, and a strip shows all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.core.units import UNKNOWN
from fsdp_magic.panels import heat_strip
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
    share,
    unit_of,
    warning,
)
from fsdp_magic.panels.heat_strip import Heat
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
    one_line,
    percent_text,
    row,
    table,
    text_table,
)

MANY_RANKS = 16
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
    shown, labels = _shown(gauges)
    strip = ""
    if len(shown) < len(gauges):
        high = scale_text(gauges) or "capacity"
        strip = heat_strip.html(_heat(gauges), heading=_heat_heading(gauges), low="0", high=high)
    title = f"{'Memory at peak' if at_peak else 'Memory'}, {unit_of(gauges).name}"
    # The devices take what room is left, so that no name, however long, adds a line.
    rest = f"flex:1 1 60px;min-width:0;overflow:hidden;text-overflow:ellipsis;{SMALL}"
    devices = escape(_devices(gauges))
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:0px 14px;'
        f'margin:6px 0 2px 0"><b>{title} </b>{legend()}<span title="{devices}" style="{rest};'
        f'text-align:right;white-space:nowrap">{devices}</span></div>'
        + _table(shown, labels, at_peak=at_peak)
        + strip
    )


def text(gauges: Sequence[Gauge], *, at_peak: bool) -> list[str]:
    """Return the same as lines of text; see ``html``."""
    if not gauges:
        return []
    gauges = measured(gauges)
    shown, labels = _shown(gauges)
    lines = _lines(shown, labels, at_peak=at_peak)
    if len(shown) < len(gauges):
        lines += heat_strip.text(_heat(gauges), heading=_heat_heading(gauges))
    return lines


def _shown(gauges: Sequence[Gauge]) -> tuple[list[Gauge], list[str]]:
    """Return the ranks that get a bar, and their labels: all, or three of many."""
    if len(gauges) < MANY_RANKS:
        return list(gauges), [str(gauge.rank) for gauge in gauges]
    largest = full_bytes(gauges)
    ordered = sorted(
        gauges, key=lambda gauge: (-share(gauge, gauge.highest_bytes, largest), gauge.rank)
    )
    chosen = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    words = ("worst", "median", "best")
    return chosen, [f"{gauge.rank} {word}" for word, gauge in zip(words, chosen, strict=True)]


def _heat(gauges: Sequence[Gauge]) -> list[Heat]:
    unit, largest = unit_of(gauges), full_bytes(gauges)
    return [
        Heat(
            share=None if gauge.memory is None else share(gauge, gauge.used_bytes or 0, largest),
            words=f"rank {gauge.rank} {unit.text(gauge.used_bytes)} {unit.name}",
            edge=warning(gauge)[1],
        )
        for gauge in gauges
    ]


def _heat_heading(gauges: Sequence[Gauge]) -> str:
    return f"used memory, ranks {gauges[0].rank} to {gauges[-1].rank}"


def _table(gauges: Sequence[Gauge], labels: Sequence[str], *, at_peak: bool) -> str:
    """Return a table with a bar and the numbers of each rank.

    Args:
        gauges: the ranks.
        labels: text in front of each.
        at_peak: whether the bars show the moment of the peak and the mean activity.
    """
    columns = _Columns.of(gauges, at_peak=at_peak)
    unit, largest = columns.unit, full_bytes(gauges)
    rows = [
        row(
            cell(_label(label), style=FIRST)
            + (cell(muted(escape(one_line(gauge.device_name)))) if columns.names else "")
            + cell(bar(gauge, unit=unit, largest=largest), style="width:100%")
            + "".join(number_cell(value) for value in columns.numbers_html(gauge))
        )
        for gauge, label in zip(gauges, labels, strict=True)
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
    """Return what the ranks run on, if they run on the same."""
    names = {one_line(gauge.device_name) for gauge in gauges}
    return f"{len(gauges)} × {names.pop()}" if len(names) == 1 else f"{len(gauges)} ranks"


def _label(label: str) -> str:
    """Return a rank in bold, and what it stands for."""
    rank, _, word = label.partition(" ")
    return f"<b>{rank}</b> {muted(word)}" if word else f"<b>{rank}</b>"


def _lines(gauges: Sequence[Gauge], labels: Sequence[str], *, at_peak: bool) -> list[str]:
    """Return the same as lines of text; see ``_table``."""
    columns = _Columns.of(gauges, at_peak=at_peak)
    largest = full_bytes(gauges)
    rows = [["rank", f"memory, {columns.unit.name}", *columns.heads]]
    for gauge, label in zip(gauges, labels, strict=True):
        rows.append([label, f"[{letters(gauge, largest=largest)}]", *columns.numbers(gauge)])
    key = "  ".join(f"{part.letter} {part.name}" for part in PARTS)
    fullest = max(gauges, key=lambda gauge: gauge.highest_bytes)
    moment = f"rank {fullest.rank}: {breakdown(fullest, columns.unit)}"
    key += "" if at_peak else "  | peak used"
    if scale := scale_text(gauges):
        key += f"  {scale}"
    return [*text_table(rows, left=2), key, moment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Which columns a table of gauges has: what no rank knows gets none."""

    unit: MemoryUnit
    at_peak: bool
    names: bool
    utilisation: bool
    temperature: bool
    power: bool

    @classmethod
    def of(cls, gauges: Sequence[Gauge], *, at_peak: bool) -> _Columns:
        """Return the columns that some ranks need."""
        activities = [gauge.activity for gauge in gauges]
        return cls(
            unit=unit_of(gauges),
            at_peak=at_peak,
            names=len({gauge.device_name for gauge in gauges}) > 1,
            utilisation=any(a.utilisation_percent is not None for a in activities),
            temperature=any(a.temperature_celsius is not None for a in activities),
            power=any(a.power_watts is not None for a in activities),
        )

    @property
    def heads(self) -> list[str]:
        """Headings of the columns of numbers."""
        heads = ["used at peak"] if self.at_peak else ["used", "peak used"]
        heads.append("capacity")
        mean = "mean " if self.at_peak else ""
        heads += [f"{mean}util"] if self.utilisation else []
        heads += ["°C"] if self.temperature else []
        return heads + (["W"] if self.power else [])

    def numbers(self, gauge: Gauge) -> list[str]:
        """Return the numbers of a rank, as text."""
        sizes = [gauge.used_bytes] if self.at_peak else [gauge.used_bytes, gauge.peak_bytes]
        values = [self.unit.text(size) for size in sizes]
        values.append(capacity_text(gauge.capacity_bytes, self.unit))
        activity = gauge.activity
        values += [percent_text(activity.utilisation_percent)] if self.utilisation else []
        values += [_whole(activity.temperature_celsius)] if self.temperature else []
        return values + ([_whole(activity.power_watts)] if self.power else [])

    def numbers_html(self, gauge: Gauge) -> list[str]:
        """Return the numbers of a rank, as HTML; the peak carries the warning."""
        values = self.numbers(gauge)
        sign, colour, sentence = warning(gauge)
        peak = 0 if self.at_peak else 1
        mark = f'<span title="{sentence}">{icon(sign, colour)}</span> ' if sign else ""
        values[0] = f"<b>{values[0]}</b>"
        values[peak] = mark + values[peak]
        return values


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"
