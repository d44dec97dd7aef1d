"""The peak of a ledger as a function of the micro-batch size, and the largest size that fits; pure.

After each entry the bytes held are a polynomial in the size. Only those that no other exceeds at
every size can be the peak: there are few, and the largest of them at a size is the peak there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fsdp_magic.core.planning.ledger import Entry, Ledger

MOST_SAMPLES = 1 << 20
"""The largest size that is looked for: memory that does not grow with samples fits any number."""


class Level(NamedTuple):
    """Bytes held after an entry, as a polynomial in the micro-batch size."""

    fixed: float
    per_sample: float
    per_pair: float
    entry: int

    def at(self, micro_batch_size: int) -> float:
        """Return the bytes for a micro-batch size."""
        b = micro_batch_size
        return self.fixed + b * (self.per_sample + b * self.per_pair)


class PeakCurve:
    """The peak of a ledger for any micro-batch size.

    Args:
        ledger: what a rank takes and gives back.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._levels = _undominated(_tops(ledger.entries))

    def at(self, micro_batch_size: int) -> float:
        """Return the most bytes held at once."""
        return max((level.at(micro_batch_size) for level in self._levels), default=0.0)

    def entry(self, micro_batch_size: int) -> int:
        """Return the number of the entry after which most bytes are held."""
        if not self._levels:
            return 0
        return max(self._levels, key=lambda level: (level.at(micro_batch_size), -level.entry)).entry

    def largest(self, capacity_bytes: float) -> int:
        """Return the largest micro-batch size whose peak fits; 0: not even one sample does."""
        if self.at(1) > capacity_bytes:
            return 0
        if self.at(MOST_SAMPLES) <= capacity_bytes:
            return MOST_SAMPLES
        fits, too_large = 1, 2
        while self.at(too_large) <= capacity_bytes:
            fits, too_large = too_large, 2 * too_large
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.at(middle) <= capacity_bytes:
                fits = middle
            else:
                too_large = middle
        return fits


def _tops(entries: Sequence[Entry]) -> list[Level]:
    """Return the levels after which the next entry gives back: no other can be a peak."""
    tops = []
    fixed = per_sample = per_pair = 0.0
    rising = False
    for number, entry in enumerate(entries):
        size = entry.size
        if not entry.taken:
            if rising:
                tops.append(Level(fixed, per_sample, per_pair, number - 1))
            rising = False
            fixed -= size.fixed
            per_sample -= size.per_sample
            per_pair -= size.per_pair
            continue
        rising = True
        fixed += size.fixed
        per_sample += size.per_sample
        per_pair += size.per_pair
    if rising:
        tops.append(Level(fixed, per_sample, per_pair, len(entries) - 1))
    return tops


def _undominated(levels: Sequence[Level]) -> list[Level]:
    """Return levels of which none is at most another at every size, the earliest of equal ones."""
    kept: list[Level] = []
    ordered = sorted(levels, key=lambda at: (-at.per_pair, -at.per_sample, -at.fixed, at.entry))
    # Where no level grows with the square, those before one grow faster: it counts if it has more
    # to begin with than all of them.
    most = -math.inf
    are_lines = not any(level.per_pair for level in levels)
    for level in ordered:
        if are_lines:
            is_exceeded = level.fixed <= most
            most = max(most, level.fixed)
        else:
            is_exceeded = any(
                other.fixed >= level.fixed and other.per_sample >= level.per_sample
                for other in kept
            )
        if not is_exceeded:
            kept.append(level)
    return kept
