"""The axes of the tuner's chart: sizes across, memory and speed upwards, and what is drawn; pure.

Sizes stand on a linear axis, on which memory is a straight line, unless they were doubled over
decades: then most would fall on one spot at its left, and the axis is logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fsdp_magic.panels.label_places import NARROW, Point, text_width
from fsdp_magic.panels.parts import MemoryUnit, memory_unit
from fsdp_magic.panels.tuner_view import TunerView

MEMORY_HEIGHT = 190
_HEADROOM = 1.16
_DECADES = 64
"""Largest over smallest size from which a logarithmic axis is thought of."""
_FAR = 8
"""A capacity this many times above everything is not drawn, or the rest would be flat."""
_COLUMNS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAxis:
    """Micro-batch sizes across.

    Attributes:
        first: size at its left end.
        last: size at its right end.
        is_logarithmic: whether equal distances are equal ratios.
    """

    first: float
    last: float
    is_logarithmic: bool = False

    def left(self, size: float) -> float:
        """Return where a size is, in percent of the width."""
        if self.is_logarithmic:
            return 100 * math.log(size / self.first) / math.log(self.last / self.first)
        return 100 * (size - self.first) / (self.last - self.first)

    def size(self, left: float) -> float:
        """Return the size at a place; see ``left``."""
        if self.is_logarithmic:
            return self.first * math.pow(self.last / self.first, left / 100)
        return self.first + (self.last - self.first) * left / 100

    def ticks(self, named: Iterable[int]) -> list[int]:
        """Return the sizes whose figures stand under the axis, none over another.

        Args:
            named: sizes to have in any case, most important first, as far as there is room.
        """
        chosen: list[int] = []
        for size in [*named, *filter(self._is_inside, self._round())]:
            if all(self._are_apart(size, other) for other in chosen):
                chosen.append(size)
        return sorted(chosen)

    def _have_room(self, sizes: Sequence[int]) -> bool:
        return all(self._are_apart(one, other) for one, other in pairwise(sizes))

    def _is_inside(self, size: int) -> bool:
        """Return whether the figure of a size ends within the picture."""
        return (100 - self.left(size)) * NARROW / 100 > text_width(f"{size:,}") / 2

    def _are_apart(self, size: int, other: int) -> bool:
        widths = text_width(f"{size:,}") + text_width(f"{other:,}")
        return abs(self.left(size) - self.left(other)) * NARROW / 100 > widths / 2 + 6

    def _round(self) -> list[int]:
        """Return round sizes within the axis: as many as have room beside each other."""
        if self.is_logarithmic:
            powers = range(max(0, math.ceil(math.log2(self.first))), int(math.log2(self.last)) + 1)
            every = next(n for n in range(1, 64) if self._have_room([2**p for p in powers][::n]))
            return [2**power for power in powers[::every]]
        step = next(
            step
            for step in _round_steps()
            if (step / (self.last - self.first)) * NARROW > text_width(f"{self.last:,.0f}") + 8
        )
        start = max(1, math.ceil(self.first / step)) * step
        return list(range(start, int(self.last) + 1, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAxis:
    """Memory upwards.

    Attributes:
        top_bytes: at its upper end.
        unit: of its figures.
        capacity_bytes: where the capacity is drawn; None: it is not known, or far above.
        is_known: whether anything says how much memory is spoken of.
    """

    top_bytes: float
    unit: MemoryUnit
    capacity_bytes: int | None
    is_known: bool = True

    def top(self, count: float) -> float:
        """Return where a number of bytes is, in pixels from the upper end; never outside."""
        return MEMORY_HEIGHT * (1 - min(1.0, max(0.0, count / self.top_bytes)))

    def ticks(self) -> list[tuple[float, str]]:
        """Return round sizes in bytes with their figures, from 0 on."""
        if not self.is_known:
            return []
        size, most = self.unit.size, self.top_bytes / self.unit.size
        step = 10.0 ** math.floor(math.log10(most / 4))
        step = next(step * n for n in (1, 2, 5, 10) if most / (step * n) <= 5.2)
        return [(n * step * size, f"{n * step:,.4g}") for n in range(int(most / step) + 1)]


def size_axis(view: TunerView) -> SizeAxis:
    """Return the axis on which every size has a place."""
    marked = sorted({*(p.micro_batch_size for p in view.probes), *_named(view)})
    sizes = sorted({*marked, *(size for size, _ in _near(view, marked))}) or [1]
    least, most = max(1, sizes[0]), max(1, sizes[-1])
    if most >= _DECADES * least and _is_doubled([s for s in marked if s > 0]):
        spread = (most / least) ** 0.05
        return SizeAxis(first=least / spread, last=most * spread, is_logarithmic=True)
    if least > most / 2 and most - least > 2:
        return SizeAxis(first=least - 0.2 * (most - least), last=most + 0.12 * (most - least))
    return SizeAxis(first=0.0, last=1.1 * most + 0.9)


def memory_axis(view: TunerView) -> MemoryAxis:
    """Return the axis on which the capacity and every measured size have a place."""
    peaks = [p.peak_bytes for p in view.probes if p.peak_bytes is not None]
    near = _near(view, [p.micro_batch_size for p in view.probes])
    highest = max([*peaks, *(peak for _, peak in near)], default=0)
    capacity = view.capacity_bytes
    all_fit = all(probe.fits for probe in view.probes)
    if capacity and highest and capacity > _FAR * highest and _is_over(view) and all_fit:
        capacity = None
    reach = max(capacity or 0, *peaks, 0) if capacity else highest
    unit = memory_unit([capacity or highest or None])
    return MemoryAxis(
        top_bytes=_HEADROOM * (reach or unit.size),
        unit=unit,
        capacity_bytes=capacity,
        is_known=reach > 0,
    )


def expected_bytes(view: TunerView, size: float) -> float | None:
    """Return the memory of a size by the plan, or by a line through what was measured."""
    known = sorted(view.planned) or _measured(view)
    if view.planned and len(known) > 1:
        return _between(known, size)
    return _fitted(known, size) if len(known) > 1 else None


def curve(view: TunerView, axis: SizeAxis, memory: MemoryAxis) -> list[Point]:
    """Return the line of expected memory as points, as far as it is known and in the picture."""
    points = []
    known = sorted(view.planned) or _measured(view)
    ends = (known[0][0], known[-1][0] if view.planned else math.inf) if known else (0, 0)
    for column in range(_COLUMNS + 1):
        size = axis.size(100 * column / _COLUMNS)
        expected = expected_bytes(view, size) if ends[0] <= size <= ends[1] else None
        if expected is not None and 0 <= expected <= memory.top_bytes:
            points.append(Point(100 * column / _COLUMNS, memory.top(expected)))
    return points


def _named(view: TunerView) -> list[int]:
    return [size for size in (view.trying, view.pick) if size]


def _is_over(view: TunerView) -> bool:
    return view.state in ("done", "stopped", "failed")


def _near(view: TunerView, marked: Sequence[int]) -> list[tuple[int, int]]:
    """Return what is planned up to the capacity, or up to what was tried."""
    most = max(marked, default=0)
    limit = _HEADROOM * view.capacity_bytes if view.capacity_bytes else math.inf
    planned = [(size, peak) for size, peak in view.planned if peak <= limit or size <= most]
    if _is_over(view) and most:
        return [(size, peak) for size, peak in planned if size <= 3 * most]
    return planned


def _measured(view: TunerView) -> list[tuple[int, int]]:
    return sorted(
        (p.micro_batch_size, p.peak_bytes) for p in view.probes if p.peak_bytes is not None
    )


def _between(known: Sequence[tuple[int, int]], size: float) -> float:
    """Return memory between two planned sizes, in which it is affine, or beyond them."""
    pairs = list(pairwise(known))
    (a, low), (b, high) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
    return low + (high - low) * (size - a) / (b - a) if b > a else float(high)


def _fitted(known: Sequence[tuple[int, int]], size: float) -> float | None:
    """Return the value at a size of the line of least squares; None: it is no line."""
    count = len(known)
    middle = sum(s for s, _ in known) / count
    level = sum(peak for _, peak in known) / count
    spread = sum((s - middle) ** 2 for s, _ in known)
    if not spread:
        return None
    slope = sum((s - middle) * (peak - level) for s, peak in known) / spread
    return level + slope * (size - middle)


def _is_doubled(sizes: Sequence[int]) -> bool:
    """Return whether ratios of neighbours are more alike than their distances."""
    pairs = list(pairwise(sizes))
    if len(pairs) < 3:
        return False
    ratios = [math.log(b / a) / math.log(sizes[-1] / sizes[0]) for a, b in pairs]
    steps = [(b - a) / (sizes[-1] - sizes[0]) for a, b in pairs]
    return sum(map(math.log, ratios)) > sum(map(math.log, steps))


def _round_steps() -> Iterable[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10
