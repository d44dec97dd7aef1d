"""What a plan is made for: a card's memory, and what of it is not there for tensors; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_magic.core.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one rank.

    Attributes:
        name: as it is shown: ``24 GiB``, ``A100-80GB``, ``CPU engine``.
        kind: of which kernels and allocator the plan is.
        capacity_bytes: all of its memory.
        context_bytes: what CUDA, its libraries and kernels take outside torch's allocator.
        communication_bytes: what NCCL takes outside torch's allocator.
    """

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    capacity_bytes: int
    context_bytes: int = 512 * MIB
    communication_bytes: int = 256 * MIB

    @property
    def usable_bytes(self) -> int:
        """Bytes that torch's allocator can have."""
        return self.capacity_bytes - self.context_bytes - self.communication_bytes
