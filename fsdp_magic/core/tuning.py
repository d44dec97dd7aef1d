"""Which micro-batch sizes a search may try, and what ranks are asked and report in it; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.core.specs import TrainSpec, TuneSpec

_ENDLESS = 1 << 20
"""The largest size that is tried where neither the data nor anybody says an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRequest:
    """Say what there is room for.

    Attributes:
        spec: of the steps, with the data that they read.
    """

    spec: TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomReport:
    """What a rank has room for.

    Attributes:
        most_samples: the largest micro-batch size of which the data fill a step; None: nobody
            knows before they are read.
        room_bytes: what tensors may take on this rank's device, all that is held included.
        capacity_bytes: of the device, or of this rank's share of it.
        held_bytes: allocated before any step.
        other_bytes: of those, what is neither parameter, gradient nor optimizer state.
    """

    most_samples: int | None
    room_bytes: int
    capacity_bytes: int
    held_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRequest:
    """Keep everything that steps change, to put it back after each that is tried."""


def sizes_of(most: int | None, spec: TuneSpec, training: TrainSpec, *, ranks: int) -> Sequence[int]:
    """Return the sizes that may be tried, ascending: where a global batch is kept, its parts.

    Args:
        most: the largest of which the data fill a step; None: not known.
        spec: what was asked for.
        training: the options of the steps.
        ranks: in the world.
    """
    end = min((n for n in (most, spec.max) if n is not None), default=_ENDLESS)
    if training.global_batch_size is None:
        return range(1, end + 1)
    share = training.global_batch_size // (ranks if training.data_sharding == "auto" else 1)
    return [size for size in range(1, min(end, share) + 1) if share % size == 0]
