"""Memory of a rank over two steps, by kind, thinned to what a picture shows; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

from fsdp_magic.core.planning.ledger import Ledger, Phase, phase_at
from fsdp_magic.core.planning.step_trace import Kind

KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_POINTS = 600


class Point(NamedTuple):
    """What is held after an entry of the ledger: bytes of each of ``KINDS``."""

    entry: int
    held: tuple[float, ...]

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Memory of a rank over two steps, in the order of allocations, which is not that of time.

    Attributes:
        strategy: whose.
        micro_batch_size: samples of a rank's forward.
        points: of each stretch of entries the one at which most is held; the peak is among them.
        phases: from which entry on: ``step 1: forward`` and the like.
        entries: how many entries there are.
        peak: the number of the point at which most is held.
    """

    strategy: str
    micro_batch_size: int
    points: tuple[Point, ...]
    phases: tuple[Phase, ...]
    entries: int
    peak: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return round(self.points[self.peak].total) if self.points else 0

    @property
    def peak_phase(self) -> str:
        """The phase in which most is held."""
        return phase_at(self.phases, self.points[self.peak].entry) if self.points else ""

    def held(self, point: int) -> dict[Kind, int]:
        """Return the bytes of each kind at a point, those that hold any."""
        sizes = zip(KINDS, self.points[point].held, strict=True)
        return {kind: round(size) for kind, size in sizes if round(size)}


def timeline_of(
    ledger: Ledger, micro_batch_size: int, *, strategy: str = "", most_points: int = MOST_POINTS
) -> Timeline:
    """Return the timeline of a ledger for a micro-batch size."""
    count = len(ledger.entries)
    stretch = max(1, -(-count // most_points))
    kind_number = {kind: number for number, kind in enumerate(KINDS)}
    held = [0.0] * len(KINDS)
    total, points = 0.0, []
    highest, best = -1.0, Point(0, tuple(held))
    for number, entry in enumerate(ledger.entries):
        size = entry.size.at(micro_batch_size)
        change = size if entry.taken else -size
        held[kind_number[entry.kind]] += change
        total += change
        if total > highest:
            # Rounding of large sums leaves a kind a little below zero where nothing of it is held.
            highest, best = total, Point(number, tuple(max(0.0, each) for each in held))
        if (number + 1) % stretch == 0 or number + 1 == count:
            points.append(best)
            highest = -1.0
    return Timeline(
        strategy=strategy,
        micro_batch_size=micro_batch_size,
        points=tuple(points),
        phases=tuple(ledger.phases),
        entries=count,
        peak=max(range(len(points)), key=lambda n: points[n].total, default=0),
    )
