"""Memory of each rank as a bar cut into what holds it; pure.

The parts of a bar add up to the used bytes exactly: each takes what is left of them, in the
order parameters, gradients, optimizer state, activations, cache, and other is the rest. A tick
marks the peak. All numbers of a panel are in one unit, so that columns align. A full bar is the
device; where that is not known, or is so large that every bar would be empty, it is a round
size, which is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_magic.core.telemetry import DeviceSample, MemorySample
from fsdp_magic.core.units import MIB, UNKNOWN, bytes_text
from fsdp_magic.panels.parts import (
    GREY,
    ORANGE,
    RED,
    TRACK,
    MemoryUnit,
    escape,
    hidden,
    memory_unit,
)

TIGHT, NEARLY_FULL = 0.88, 0.95
"""Shares of the capacity, at the peak and without cache, from which a rank is marked."""

_EMPTY = 1 / 32
"""A device is no measure for bars that are all shorter than this share of it."""

_SMALLEST_BYTES = 16 * MIB
"""The least that a full bar means: a bar of nearly nothing is to look like nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a bar: its name, its letter in text, the style of its box."""

    name: str
    letter: str
    style: str


PARTS = (
    Part(name="parameters", letter="P", style="background:#5C93E6"),
    Part(name="gradients", letter="G", style="background:#BF8613"),
    Part(name="optimizer", letter="O", style="background:#00733D"),
    Part(name="activations", letter="A", style="background:#884D8C"),
    Part(
        name="cache",
        letter="c",
        style=f"box-sizing:border-box;border:1px solid {GREY};background:"
        f"repeating-linear-gradient(135deg,{GREY} 0px,{GREY} 1px,transparent 1px,transparent 4px)",
    ),
    Part(name="other", letter="x", style=f"background:{GREY}"),
)
MEANINGS = {
    "activations": "allocated beside parameters, gradients and optimizer state: batches too",
    "cache": "reserved by the allocator, not allocated",
    "other": "used on the device beyond what is reserved, other processes included",
}
UNKNOWN_ACTIVITY = DeviceSample()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """What one bar shows.

    Attributes:
        rank: the rank.
        device_name: of its device.
        memory: what the bar is cut from; None: not known yet.
        peak_bytes: where the tick is; None: no tick.
        activity: how busy the device is.
        magnified: whether the device is no measure for the bar.
    """

    rank: int
    device_name: str
    memory: MemorySample | None
    peak_bytes: int | None
    activity: DeviceSample = UNKNOWN_ACTIVITY
    magnified: bool = False

    @property
    def used_bytes(self) -> int | None:
        """Used bytes, if known."""
        return None if self.memory is None else self.memory.used_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """Size of the device, if known."""
        return None if self.memory is None else self.memory.capacity_bytes

    @property
    def full_bytes(self) -> int | None:
        """What a full bar means, if that is the device's size."""
        return None if self.magnified else self.capacity_bytes

    @property
    def highest_bytes(self) -> int:
        """The most that is known to have been used; 0 if nothing is."""
        return max(self.used_bytes or 0, self.peak_bytes or 0)


def parts_of(memory: MemorySample) -> tuple[int, ...]:
    """Return the bytes of each of ``PARTS``; they add up to the used bytes."""
    left, sizes = memory.used_bytes, []
    for wanted in (
        memory.parameter_bytes,
        memory.gradient_bytes,
        memory.optimizer_bytes,
        memory.activation_bytes,
        memory.cache_bytes,
    ):
        sizes.append(max(0, min(wanted, left)))
        left -= sizes[-1]
    return (*sizes, left)


def unit_of(gauges: Sequence[Gauge]) -> MemoryUnit:
    """Choose one unit for a panel."""
    return memory_unit(
        count for gauge in gauges for count in (gauge.highest_bytes or None, gauge.full_bytes)
    )


def measured(gauges: Sequence[Gauge]) -> list[Gauge]:
    """Return gauges as they are drawn: magnified where every bar would be empty."""
    known = [gauge for gauge in gauges if gauge.memory is not None and gauge.highest_bytes]
    if not known or any(g.highest_bytes > _EMPTY * (g.capacity_bytes or 0) for g in known):
        return list(gauges)
    return [replace(gauge, magnified=True) for gauge in gauges]


def full_bytes(gauges: Sequence[Gauge]) -> int:
    """Return what a full bar means where the device is no measure.

    It is the next round size (1, 1½, 2, 3, 4, 6, …) above the largest peak, so that bars do not
    move with every new peak.
    """
    highest = max([_SMALLEST_BYTES, *(gauge.highest_bytes for gauge in gauges)])
    power = 1 << (highest - 1).bit_length()
    return 3 * power // 4 if highest <= 3 * power // 4 else power


def scale_text(gauges: Sequence[Gauge]) -> str:
    """Return what a full bar means, where it is not the capacity; else nothing."""
    known = [gauge for gauge in gauges if gauge.memory is not None]
    if not known or all(gauge.full_bytes is not None for gauge in known):
        return ""
    return f"full bar {bytes_text(full_bytes(gauges)).replace('.0 ', ' ')}"


def capacity_text(capacity_bytes: int | None, unit: MemoryUnit) -> str:
    """Return a capacity in the panel's unit, or in its own if that is far larger."""
    if capacity_bytes is not None and capacity_bytes >= 1024 * unit.size:
        return bytes_text(capacity_bytes)
    return unit.text(capacity_bytes)


def share(gauge: Gauge, count: int, largest: int) -> float:
    """Return which part of a rank's bar some bytes take, 0 to 1."""
    full = max(gauge.full_bytes or largest, gauge.used_bytes or 0, 1)
    return min(1.0, max(0.0, count / full))


def bar(gauge: Gauge, *, unit: MemoryUnit, largest: int, height: int = 12) -> str:
    """Draw one rank's memory.

    Args:
        gauge: the rank.
        unit: of its numbers.
        largest: what a full bar means if it is not the device.
        height: in pixels.
    """
    words = breakdown(gauge, unit)
    boxes = ""
    if gauge.memory is not None:
        boxes = "".join(
            _box(part, share(gauge, size, largest), f"{part.name} {unit.text(size)} {unit.name}")
            for part, size in zip(PARTS, parts_of(gauge.memory), strict=True)
            if size
        )
    label = f"rank {gauge.rank}: {words}"
    return (
        f'<div role="img" aria-label="{escape(label)}" style="display:flex;position:relative;'
        f"height:{height}px;min-width:70px;background:{TRACK};border-radius:3px;"
        f'overflow:hidden">{boxes}{_tick(gauge, unit, largest)}{hidden(words)}</div>'
    )


def breakdown(gauge: Gauge, unit: MemoryUnit) -> str:
    """Return the parts of a rank's memory in words."""
    if gauge.memory is None:
        return f"memory {UNKNOWN}"
    sizes = zip(PARTS, parts_of(gauge.memory), strict=True)
    held = ", ".join(f"{part.name} {unit.text(size)}" for part, size in sizes if size)
    return f"{held} {unit.name}" if held else "nothing used"


def legend(parts: Sequence[Part] = PARTS) -> str:
    """Return the key to the colours."""
    entries = "".join(
        f'<span title="{MEANINGS.get(part.name, part.name)}" style="white-space:nowrap;'
        'margin-right:10px"><span style="display:inline-block;width:9px;height:9px;'
        f'{part.style}"></span> {part.name}</span> '
        for part in parts
    )
    return f'<span style="font-size:12px">{entries}</span>'


def warning(gauge: Gauge) -> tuple[str, str, str]:
    """Return sign, colour and sentence for a rank that is nearly full; empty if it is not."""
    memory = gauge.memory
    if memory is None or not memory.capacity_bytes:
        return "", "", ""
    filled = (gauge.highest_bytes - parts_of(memory)[4]) / memory.capacity_bytes
    sentence = f"{filled:.0%} of the capacity at the peak, not counting cache"
    if filled >= NEARLY_FULL:
        return "▲", RED, sentence
    return ("△", ORANGE, sentence) if filled >= TIGHT else ("", "", "")


def letters(gauge: Gauge, *, largest: int, width: int = 24) -> str:
    """Return a bar as letters, one per part, and a stroke at the peak."""
    line, filled = "", 0.0
    if gauge.memory is not None:
        for part, size in zip(PARTS, parts_of(gauge.memory), strict=True):
            filled += share(gauge, size, largest) * width
            line += part.letter * (round(filled) - len(line))
    line = line[:width].ljust(width)
    if gauge.peak_bytes is None:
        return line
    at = min(width - 1, int(share(gauge, gauge.peak_bytes, largest) * width))
    return line[:at] + "|" + line[at + 1 :] if line[at] == " " else line


def _box(part: Part, part_share: float, title: str) -> str:
    # A line between parts helps where colours are hard to tell; it would cover a thin part.
    edge = ";box-shadow:inset -1px 0px 0px rgba(255,255,255,.5)" if part_share > 0.008 else ""
    return f'<span title="{title}" style="width:{100 * part_share:.2f}%;{part.style}{edge}"></span>'


def _tick(gauge: Gauge, unit: MemoryUnit, largest: int) -> str:
    """Return a stroke at the peak, in the colour of the text or of the warning."""
    if gauge.peak_bytes is None:
        return ""
    left = min(99.6, 100 * share(gauge, gauge.peak_bytes, largest))
    return (
        f'<span title="peak {unit.text(gauge.peak_bytes)} {unit.name}" style="position:absolute;'
        f'left:{left:.2f}%;height:100%;border-left:2px solid {warning(gauge)[1]}"></span>'
    )
