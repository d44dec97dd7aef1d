"""The losses of a run, thinned as they come, so that drawing them costs the same at any length.

Losses fall into stretches of equal length, of which there are at most ``_MOST``: when they are
full, each two become one. So a run of 100,000 steps is drawn as fast as one of a hundred; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_MOST = 120
_HUGE = 1e100
"""Losses beyond it are taken for it: sums and differences of larger ones are not finite."""

Point = tuple[float, float | None]
"""A step (counted from the run's first) and its loss; None where the loss is not finite."""


class LossHistory:
    """Losses of a run, one per finished step.

    Args:
        losses: those that are there already; may hold nan and infinities.

    Attributes:
        count: number of losses.
        first, last: the first and the last of them; None: there are none.
        lowest, highest: of those that are finite; None: none is.
        first_non_finite: how many came before the first that is not finite; None: all are.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.count = 0
        self.first: float | None = None
        self.last: float | None = None
        self.lowest: float | None = None
        self.highest: float | None = None
        self.first_non_finite: int | None = None
        self._length = 1
        self._sums: list[float] = []  # of each stretch; nan where a loss was not finite
        self._room = 0  # of the last stretch
        self.extend(losses)

    def extend(self, losses: Iterable[float]) -> None:
        """Take losses that have come."""
        for loss in losses:
            finite = math.isfinite(loss)
            if not finite and self.first_non_finite is None:
                self.first_non_finite = self.count
            if finite:
                self._widen(loss)
            self._add(max(-_HUGE, min(_HUGE, loss)) if finite else math.nan)
            self.first = loss if self.count == 0 else self.first
            self.last = loss
            self.count += 1

    @property
    def points(self) -> list[Point]:
        """The mean of each stretch, at its middle."""
        points: list[Point] = []
        for number, total in enumerate(self._sums):
            start = number * self._length
            end = min(start + self._length, self.count)
            mean = None if math.isnan(total) else total / (end - start)
            points.append(((start + end - 1) / 2, mean))
        return points

    def _widen(self, loss: float) -> None:
        self.lowest = loss if self.lowest is None else min(self.lowest, loss)
        self.highest = loss if self.highest is None else max(self.highest, loss)

    def _add(self, loss: float) -> None:
        if self._room:
            self._sums[-1] += loss
            self._room -= 1
            return
        if len(self._sums) == _MOST:
            sums = self._sums
            self._sums = [sums[i] + sums[i + 1] for i in range(0, _MOST, 2)]
            self._length *= 2
        self._sums.append(loss)
        self._room = self._length - 1
