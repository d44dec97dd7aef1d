"""Many ranks in little room: the fullest, the median and the emptiest, and a strip of all; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_magic.panels import heat_strip
from fsdp_magic.panels.gauges import Gauge, full_bytes, scale_text, share, unit_of, warning
from fsdp_magic.panels.heat_strip import Heat
from fsdp_magic.panels.parts import muted

MANY_RANKS = 16
"""From here on a row per rank is too much to take in."""

Where = Callable[[Gauge], str]
"""From a rank to a few words on it, for its cell of the strip."""


def shown(gauges: Sequence[Gauge]) -> list[tuple[Gauge, str]]:
    """Return the ranks that get a row, and their labels: all, or three of many."""
    if len(gauges) < MANY_RANKS:
        return [(gauge, str(gauge.rank)) for gauge in gauges]
    largest = full_bytes(gauges)
    ordered = sorted(
        gauges, key=lambda gauge: (-share(gauge, gauge.highest_bytes, largest), gauge.rank)
    )
    chosen = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    words = ("worst", "median", "best")
    return [(gauge, f"{gauge.rank} {word}") for word, gauge in zip(words, chosen, strict=True)]


def label_html(label: str) -> str:
    """Return a rank in bold, and what it stands for."""
    rank, _, word = label.partition(" ")
    return f"<b>{rank}</b> {muted(word)}" if word else f"<b>{rank}</b>"


def strip_html(gauges: Sequence[Gauge], *, where: Where | None = None) -> str:
    """Return the strip of many ranks; nothing of few."""
    if len(gauges) < MANY_RANKS:
        return ""
    high = scale_text(gauges) or "capacity"
    return heat_strip.html(_heat(gauges, where), heading=_heading(gauges), low="0", high=high)


def strip_text(gauges: Sequence[Gauge]) -> list[str]:
    """Return the same as lines of text; see ``strip_html``."""
    if len(gauges) < MANY_RANKS:
        return []
    return heat_strip.text(_heat(gauges, None), heading=_heading(gauges))


def _heading(gauges: Sequence[Gauge]) -> str:
    return f"used memory, ranks {gauges[0].rank} to {gauges[-1].rank}"


def _heat(gauges: Sequence[Gauge], where: Where | None) -> list[Heat]:
    unit, largest = unit_of(gauges), full_bytes(gauges)
    return [
        Heat(
            share=None if gauge.memory is None else share(gauge, gauge.used_bytes or 0, largest),
            words=f"rank {gauge.rank}{where(gauge) if where else ''} "
            f"{unit.text(gauge.used_bytes)} {unit.name}",
            edge=warning(gauge)[1],
        )
        for gauge in gauges
    ]
