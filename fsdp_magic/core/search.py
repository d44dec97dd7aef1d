"""The search for a size: which to try next, given what was seen; pure.

For the largest that fits a plan proposes, and what was measured corrects it: by a ratio while one
size was measured, then along a line. Sizes are tried until one fits and the next was seen not to.
Where estimates were wrong twice the search trusts them no longer: it doubles until a size does
not fit and halves what lies between. The fastest is looked for from small sizes up.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Predicted = Callable[[int], float]
"""Size -> bytes at the peak."""

_TRUSTED_SURPRISES = 2
_LIKE_A_SHIFT = 0.1
"""Up to this share a plan that is off lacks something constant; beyond it, it is off by a ratio."""
_ALIKE = 0.02
"""Rates that are this near each other are as good: the smaller size is taken."""
_IN_VAIN, _HALVINGS = 2, 2
_FARTHEST = 8
"""So many times the largest size that fits is tried next, where no plan goes that far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A size that was tried.

    Attributes:
        size: it.
        fits: whether it ran with its peak inside the room.
        peak: bytes; None: memory ran out.
    """

    size: int
    fits: bool
    peak: float | None


class LargestSearch:
    """Finds the largest size that fits.

    Args:
        sizes: what may be tried, ascending.
        room: bytes that the peak may take.
        rest: bytes held before any step, for an estimate where there is no plan.
        predicted: peaks of a plan; None: there is none.
        first: where to begin without a plan.

    Attributes:
        tried: what was, in order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        room: float,
        rest: float = 0.0,
        predicted: Predicted | None = None,
        first: int = 1,
    ) -> None:
        self.tried: list[Tried] = []
        self._sizes = sizes
        self._room = room
        self._rest = rest
        self._predicted = predicted
        self._first = first
        self._low, self._high = -1, len(sizes)
        self._surprises = 0
        self._expected: bool | None = None

    @property
    def largest(self) -> int:
        """The largest size that is known to fit; 0: none is."""
        return self._sizes[self._low] if self._low >= 0 else 0

    @property
    def is_bounded(self) -> bool:
        """Whether a size was seen not to fit."""
        return self._high < len(self._sizes)

    def expected(self) -> Predicted | None:
        """Return what is expected of any size, after what was tried; None: nothing is known."""
        measured = sorted((t.size, t.peak) for t in self.tried if t.peak is not None)
        if not measured and self._predicted is None:
            return None
        return self._estimate([(size, peak) for size, peak in measured if peak is not None])

    def add(self, tried: Tried) -> None:
        """Take what a size was like."""
        self.tried.append(tried)
        index = bisect.bisect_left(self._sizes, tried.size)
        if tried.fits:
            self._low = max(self._low, index)
            self._high = max(self._high, self._low + 1)
        else:
            self._high = min(self._high, index)
            self._low = min(self._low, self._high - 1)
        if self._expected is not None and self._expected != tried.fits:
            self._surprises += 1
        self._expected = None

    def next(self) -> int | None:
        """Return what to try; None: the largest is known, and the next one was seen not to fit."""
        if self._high - self._low <= 1:
            return None
        index = self._proposal()
        return self._sizes[min(max(index, self._low + 1), self._high - 1)]

    def _proposal(self) -> int:
        border = self._border()
        if border is None or self._surprises >= _TRUSTED_SURPRISES:
            return self._halved()
        # one that is expected to fit, or the one after all of those, to see that it does not
        self._expected = border > self._low
        return border if self._expected else self._low + 1

    def _halved(self) -> int:
        """Return a size by doubling and halving alone."""
        if not self.tried:
            return self._at_most(self._first)
        if self._low < 0:  # too large, and nothing is known that fits
            failures = len(self.tried)
            return self._at_most(self._sizes[self._high] // 2) if failures < 2 else 0
        if not self.is_bounded:
            return max(self._low + 1, self._at_most(2 * self.largest))
        return (self._low + self._high) // 2

    def _border(self) -> int | None:
        """Return the place of the last size that is estimated to fit; None: nothing is known."""
        estimate = self.expected()
        if estimate is None or (self.tried and all(t.peak is None for t in self.tried)):
            return None
        low, high = self._low, self._high
        if self._predicted is None and low >= 0:
            high = min(high, self._at_most(_FARTHEST * self.largest) + 1)
        while high - low > 1:  # estimates grow with the size
            middle = (low + high) // 2
            if estimate(self._sizes[middle]) <= self._room:
                low = middle
            else:
                high = middle
        return low

    def _estimate(self, measured: Sequence[tuple[int, float]]) -> Predicted:
        """Return what is expected of any size, after sizes were measured."""
        predicted = self._predicted
        if predicted is None:
            points = [(0, min(self._rest, measured[0][1])), *measured][-2:]
            return _line(points)
        if not measured:
            return predicted
        if len(measured) == 1:
            ((size, peak),) = measured
            planned = predicted(size)
            ratio = peak / planned if planned > 0 else 1.0
            if abs(ratio - 1) > _LIKE_A_SHIFT:
                return lambda other: ratio * predicted(other)
            return lambda other: predicted(other) + peak - planned
        off = _line([(size, peak - predicted(size)) for size, peak in measured[-2:]])
        return lambda other: predicted(other) + off(other)

    def _at_most(self, size: int) -> int:
        """Return the place of the largest size up to one; of the smallest if all are larger."""
        return max(0, bisect.bisect_right(self._sizes, size) - 1)


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


def doubling_and_halving(answer: int) -> int:
    """Return how many sizes a search without any estimate tries: 1, 2, 4, … and what is between.

    Args:
        answer: the largest size that fits; 0: none does.
    """
    return 1 if answer < 1 else 2 * (answer.bit_length() - 1) + 2


def _line(points: Sequence[tuple[int, float]]) -> Predicted:
    (a, at_a), (b, at_b) = points
    slope = (at_b - at_a) / (b - a)
    return lambda size: at_b + slope * (size - b)
