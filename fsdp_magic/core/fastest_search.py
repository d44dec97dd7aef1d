"""The search for the fastest size: which to try next, given what was seen; pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_ALIKE = 0.02
"""Rates that are this near each other are as good: the smaller size is taken."""
_IN_VAIN, _HALVINGS = 2, 2


class FastestSearch:
    """Finds the size of most samples a second.

    Sizes double until twice in a row that brought nothing, or one does not fit; then what lies
    between is halved, twice at most, where the last doubling still brought something.

    Args:
        sizes: what may be tried, ascending.
        first: where to begin.

    Attributes:
        rates: samples a second of the sizes that fit.
    """

    def __init__(self, sizes: Sequence[int], *, first: int = 1) -> None:
        self.rates: dict[int, float] = {}
        self._sizes = sizes
        self._first = first
        self._low, self._high = -1, len(sizes)
        self._in_vain = self._halvings = 0

    @property
    def fastest(self) -> int:
        """The smallest size that is about as fast as any; 0: none fits."""
        if not self.rates:
            return 0
        best = max(self.rates.values())
        return min(size for size, rate in self.rates.items() if rate >= (1 - _ALIKE) * best)

    def add(self, size: int, *, fits: bool, rate: float | None) -> None:
        """Take what a size was like."""
        index = bisect.bisect_left(self._sizes, size)
        if not fits:
            self._high = min(self._high, index)
            self._low = min(self._low, self._high - 1)
            return
        best = max(self.rates.values(), default=0.0)
        self.rates[size] = rate or 0.0
        self._low = max(self._low, index)
        self._in_vain = 0 if self.rates[size] > (1 + _ALIKE) * best else self._in_vain + 1

    def next(self) -> int | None:
        """Return what to try; None: larger sizes bring nothing, or none is left."""
        low, high = self._low, self._high
        if high - low <= 1 or self._in_vain >= _IN_VAIN:
            return None
        if high == len(self._sizes):
            wanted = 2 * self._sizes[low] if low >= 0 else self._first
            place = max(0, bisect.bisect_right(self._sizes, wanted) - 1)
            return self._sizes[min(max(place, low + 1), high - 1)]
        if low >= 0:
            self._halvings += 1
        if self._halvings > _HALVINGS or self._in_vain:
            return None
        return self._sizes[(low + high) // 2]
