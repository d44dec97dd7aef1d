"""What ranks are asked and report in a search for a micro-batch size; data only, pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.specs import TrainSpec


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
