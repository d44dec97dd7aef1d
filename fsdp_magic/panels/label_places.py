"""Where the words in a picture stand: none over another, over a mark or off the page; pure.

A picture takes the width of the page, so places across are shares of it and places down are
pixels. Each label names the spots that it may have, best first; what a spot would cover is counted
on a narrow page and on a wide one, and the label takes the spot that covers least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NARROW, WIDE = 262, 530
"""Pixels that the picture has on a page of a telephone's width, and on a wide one."""
LABEL_HEIGHT = 13
_CHARACTER = 6.6
"""Pixels across, of a font of 11 pixels: DejaVu Sans, which is wider than most."""
_MARK_RADIUS = 7.0
_OFF_PAGE, _ON_LABEL, _ON_MARK, _ON_LINE = 40.0, 20.0, 6.0, 1.0


class Spot(NamedTuple):
    """A place for words.

    Attributes:
        left: of the point they are about, in percent of the width.
        top: of the words, in pixels.
        shift: from the point to the words in pixels; below 0: they end left of it.
    """

    left: float
    top: float
    shift: float

    @property
    def style(self) -> str:
        """Its declarations, for words in a box that is placed."""
        side, edge, share = "left", "left", self.left
        if self.shift < 0:
            side, edge, share = "right", "right", 100 - self.left
        return f"{side}:{share:.2f}%;margin-{edge}:{abs(self.shift):.0f}px;top:{self.top:.1f}px"


class Point(NamedTuple):
    """Something that words should not cover: percent of the width, pixels from the top."""

    left: float
    top: float


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float


def text_width(text: str) -> float:
    """Return about how many pixels words take."""
    return _CHARACTER * len(text)


def place(
    labels: Sequence[tuple[str, Sequence[Spot]]],
    *,
    marks: Sequence[Point],
    lines: Sequence[Point],
) -> list[Spot]:
    """Return a spot for each label, in which it covers least.

    Args:
        labels: words, and where they may stand, best first; the first label chooses first.
        marks: that were drawn.
        lines: points along lines that were drawn.
    """
    taken: list[tuple[str, Spot]] = []
    for text, spots in labels:
        costs = [_cost(text, spot, taken, marks, lines) for spot in spots]
        taken.append((text, spots[costs.index(min(costs))]))
    return [spot for _, spot in taken]


def _cost(
    text: str,
    spot: Spot,
    taken: Sequence[tuple[str, Spot]],
    marks: Sequence[Point],
    lines: Sequence[Point],
) -> float:
    """Return what words at a spot would cover, over both widths."""
    total = 0.0
    for width in (NARROW, WIDE):
        box = box_of(text, spot, width)
        total += _OFF_PAGE * (box[0] < 0 or box[2] > width)
        total += _ON_LABEL * sum(_meet(box, box_of(*other, width)) for other in taken)
        total += _ON_MARK * sum(_meet(box, _around(mark, _MARK_RADIUS, width)) for mark in marks)
        total += _ON_LINE * sum(_meet(box, _around(point, 1.0, width)) for point in lines)
    return total


def box_of(text: str, spot: Spot, width: int) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of words on a picture of a width, in pixels."""
    start = spot.left * width / 100 + spot.shift
    if spot.shift < 0:
        start -= text_width(text)
    return _Box(start, spot.top, start + text_width(text), spot.top + LABEL_HEIGHT)


def _around(point: Point, radius: float, width: int) -> _Box:
    x = point.left * width / 100
    return _Box(x - radius, point.top - radius, x + radius, point.top + radius)


def _meet(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
