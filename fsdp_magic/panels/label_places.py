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
"""Pixels across of a digit, in a font of 11 pixels: DejaVu Sans, which is wider than most."""
_WORDS = 0.92
"""Letters and blanks are narrower than digits."""
_BOLD = 1.12
_MARK_RADIUS = 7.0
_OFF_PAGE, _ON_LABEL, _ON_MARK, _ON_LINE = 400.0, 200.0, 6.0, 1.0
_LATER = 0.5
"""What a spot costs for each that was named before it."""


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


class Label(NamedTuple):
    """Words in a picture.

    Attributes:
        text: the words.
        spots: where they may stand, best first.
        is_strong: whether they are bold.
        is_optional: whether they are left out where every spot covers other words.
    """

    text: str
    spots: Sequence[Spot]
    is_strong: bool = False
    is_optional: bool = False

    def box(self, spot: Spot, width: int) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom at a spot of a picture of a width, in pixels."""
        wide = _WORDS * text_width(self.text) * (_BOLD if self.is_strong else 1.0)
        start = spot.left * width / 100 + spot.shift - (wide if spot.shift < 0 else 0.0)
        return _Box(start, spot.top, start + wide, spot.top + LABEL_HEIGHT)


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
    """Return about how many pixels figures take, and at most as many words."""
    return _CHARACTER * len(text)


def place(
    labels: Sequence[Label], *, marks: Sequence[Point], lines: Sequence[Point]
) -> list[tuple[Label, Spot]]:
    """Return the labels that are shown, each at the spot at which it covers least.

    Args:
        labels: the first one chooses first.
        marks: that were drawn.
        lines: points along lines that were drawn.
    """
    taken: list[tuple[Label, Spot]] = []
    for label in labels:
        costs = [
            _LATER * number + _cost(label, spot, taken, marks, lines)
            for number, spot in enumerate(label.spots)
        ]
        if not label.is_optional or min(costs) < _ON_LABEL:
            taken.append((label, label.spots[costs.index(min(costs))]))
    return taken


def _cost(
    label: Label,
    spot: Spot,
    taken: Sequence[tuple[Label, Spot]],
    marks: Sequence[Point],
    lines: Sequence[Point],
) -> float:
    """Return what words at a spot would cover, over both widths."""
    total = 0.0
    for width in (NARROW, WIDE):
        box = label.box(spot, width)
        total += _OFF_PAGE * (box[0] < 0 or box[2] > width)
        total += _ON_LABEL * sum(_meet(box, other.box(at, width)) for other, at in taken)
        total += _ON_MARK * sum(_meet(box, _around(mark, _MARK_RADIUS, width)) for mark in marks)
        total += _ON_LINE * sum(_meet(box, _around(point, 1.0, width)) for point in lines)
    return total


def _around(point: Point, radius: float, width: int) -> _Box:
    x = point.left * width / 100
    return _Box(x - radius, point.top - radius, x + radius, point.top + radius)


def _meet(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
