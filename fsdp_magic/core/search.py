"""The search for the largest size that fits: which to try next, given what was seen; pure.

A plan proposes, and what was measured corrects it: by a ratio while one size was measured, then
along a line. Sizes are tried until one fits and the next was seen not to. Estimates are followed
only as far as doubling and halving could still make up for them, so that no plan and no curve of
memory, however wrong, costs more than three sizes beyond doubling and halving alone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Predicted = Callable[[int], float]
"""Size -> bytes at the peak."""

_SPARE = 3
"""So many sizes may be tried beyond those of doubling and halving."""
_TRUSTED_MISSES = 3
_LIKE_A_SHIFT = 0.1
"""Up to this share a plan that is off lacks something constant; beyond it, it is off by a ratio."""
_SPREAD = 0.98
"""Of two sizes that a line is laid through, the smaller is at most this share of the larger."""
_NEAR, _FAR = 0.9, 0.5
"""Shares of a size that ran out: from the first on is near it, beneath the second far from it."""
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

    What is known is a pair of places in the list of sizes, counted from 1: the last that fits, 0
    where none is known to, and the first that does not, one behind the end where all may.

    Where the k-th size is the answer, at most ``doubling_and_halving(k) + 3`` sizes are tried,
    whatever the plan and however memory grows. Where it is affine in the size: 2 with a right
    plan, 3 with one that says too much by any factor, 4 with one that says too little by any.

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
        self._low, self._high = 0, len(sizes) + 1
        self._misses = 0
        self._is_to_fit: bool | None = None
        self._is_said_to_be_last = False

    @property
    def largest(self) -> int:
        """The largest size that is known to fit; 0: none is."""
        return self._sizes[self._low - 1] if self._low else 0

    def expected(self) -> Predicted | None:
        """Return what is expected of any size, after what was tried; None: nothing is known."""
        if not self._measured and self._predicted is None:
            return None
        return self._estimate(self._measured)

    def add(self, tried: Tried) -> None:
        """Take what a size was like."""
        self.tried.append(tried)
        place = bisect.bisect_left(self._sizes, tried.size) + 1
        if tried.fits:
            self._low = max(self._low, place)
            self._high = max(self._high, self._low + 1)
        else:
            self._high = min(self._high, place)
            self._low = min(self._low, self._high - 1)
        if self._is_to_fit is not None and self._is_to_fit != tried.fits:
            self._misses += 1
        self._is_said_to_be_last = self._is_to_fit is True and tried.fits

    def next(self) -> int | None:
        """Return what to try; None: the largest is known, and the next one was seen not to fit."""
        low, high = self._low, self._high
        if high - low <= 1:
            return None
        self._is_to_fit = None
        estimated = self._estimated()
        places = [] if estimated is None else [estimated]
        if self._high <= len(self._sizes) and low:
            places += [(low + high) // 2, math.isqrt(low * high)]
        for place in (min(max(place, low + 1), high - 1) for place in places):
            if self._is_affordable(place):
                break
            self._is_to_fit = None
        else:
            place = _doubled_or_halved(low, high, len(self._sizes))
        return self._sizes[place - 1]

    # -- estimates

    def _estimated(self) -> int | None:
        """Return the place that estimates propose: of a size to fit, or the one after all those."""
        border = self._border()
        if border is None:
            return None if self.tried else self._at_most(self._first)
        if self._is_said_to_be_last and border > self._low:
            self._misses += 1
        if self._misses >= _TRUSTED_MISSES:
            self._misses -= 1
            return None
        farthest = self._at_most(_FARTHEST * self.largest)
        if self._predicted is None and self._low and farthest < border:
            return farthest
        self._is_to_fit = border > self._low
        return border if self._is_to_fit else self._low + 1

    def _border(self) -> int | None:
        """Return the place of the last size that is estimated to fit; None: nothing is known."""
        measured = sorted((t.size, t.peak) for t in self.tried if t.peak is not None)
        estimate = self.expected()
        if estimate is None or (self.tried and not measured):
            return None
        low, high = self._low, self._high
        while high - low > 1:  # estimates grow with the size
            middle = (low + high) // 2
            if estimate(self._sizes[middle - 1]) <= self._room:
                low = middle
            else:
                high = middle
        return None if self._is_hearsay(low, measured) else low

    @property
    def _measured(self) -> list[tuple[int, float]]:
        return sorted((t.size, t.peak) for t in self.tried if t.peak is not None)

    def _is_hearsay(self, border: int, measured: Sequence[tuple[int, float]]) -> bool:
        """Return whether a border is the plan's alone: near what ran out, far from what did not."""
        is_the_plans = self._high < len(self._sizes)  # the end of the sizes is nobody's estimate
        if not self.tried or not is_the_plans or self._high - self._low <= 2 or border < 1:
            return False
        ran_out = self._sizes[self._high - 1]
        is_near = self._sizes[border - 1] >= _NEAR * ran_out
        return is_near and measured[-1][0] < _FAR * ran_out

    def _estimate(self, measured: Sequence[tuple[int, float]]) -> Predicted:
        """Return what is expected of any size, after sizes were measured."""
        predicted = self._predicted
        if predicted is None:
            return _line([(0, min(self._rest, measured[0][1])), *measured])
        if not measured:
            return predicted
        if len(measured) == 1:
            ((size, peak),) = measured
            planned = predicted(size)
            ratio = peak / planned if planned > 0 else 1.0
            if abs(ratio - 1) > _LIKE_A_SHIFT:
                return lambda other: ratio * predicted(other)
            return lambda other: predicted(other) + peak - planned
        off = _line([(size, peak - predicted(size)) for size, peak in measured])
        return lambda other: predicted(other) + off(other)

    def _at_most(self, size: int) -> int:
        """Return the place of the largest size up to one; of the smallest if all are larger."""
        return max(1, bisect.bisect_right(self._sizes, size))

    # -- the bound

    def _is_affordable(self, place: int) -> bool:
        """Return whether doubling and halving could end the search in time, whatever is seen."""
        end, tried = len(self._sizes), len(self.tried) + 1
        worst = max(_beyond(place, self._high, end), _beyond(self._low, place, end))
        return tried + worst <= _SPARE


def doubling_and_halving(answer: int, end: int | None = None) -> int:
    """Return how many sizes a search without any estimate tries: 1, 2, 4, … and what is between.

    Args:
        answer: the place of the largest size that fits, from 1; 0: none does.
        end: how many sizes there are; None: many more.
    """
    if answer < 1:
        return 1
    if answer == end:
        return (end - 1).bit_length() + 1
    return 2 * answer.bit_length()


def _doubled_or_halved(low: int, high: int, end: int) -> int:
    """Return the place that comes next without estimates, between what fits and what does not."""
    if low == 0:  # not the first of all: batch norm refuses a single sample
        return min(2, high - 1)
    return min(2 * low, end if high > end else (low + high) // 2)


def _beyond(low: int, high: int, end: int) -> int:
    """Return how many more sizes a search tries from here on than one that does nothing else.

    It doubles and halves from here on, the other one did from the start; whatever the answer is.
    """
    most, tried = -end, 0
    while high - low > 1:
        place = _doubled_or_halved(low, high, end)
        tried += 1
        halvings = (place - low - 1).bit_length()
        most = max(most, tried + halvings - doubling_and_halving(low, end))
        low = place
    return max(most, tried - doubling_and_halving(low, end))


def _line(points: Sequence[tuple[int, float]]) -> Predicted:
    """Return the line through the last point and the nearest that lies well before it."""
    b, at_b = points[-1]
    before = [point for point in points[:-1] if point[0] <= _SPREAD * b] or points[:1]
    a, at_a = before[-1]
    slope = (at_b - at_a) / (b - a)
    return lambda size: at_b + slope * (size - b)
