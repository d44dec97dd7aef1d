"""What a plan is made for: a card's memory, and what of it is not there for tensors; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.planning.cards import Card, find_card
from fsdp_magic.core.units import GIB, MIB, bytes_text, parse_bytes

CONTEXT_BYTES = int(0.87 * GIB)
"""What CUDA's context, the libraries and their kernels take outside torch's allocator.

Source: the out-of-memory message in https://huggingface.co/blog/pytorch-fsdp : 23.65 GiB of
capacity, 22.76 GiB reserved by torch, 20 MiB free.
"""

_NCCL_CHANNELS, _NCCL_CHANNEL_BYTES = 24, 12 * MIB
COMMUNICATION_BYTES = _NCCL_CHANNELS * _NCCL_CHANNEL_BYTES
"""What NCCL takes for the channels of one ring: 10 MiB and 2 MiB each, on at most 24 channels.

Source: the sizes in https://github.com/NVIDIA/nccl/issues/1685 ; the number of channels of a ring
over NVLink of the A100. Fewer over PCIe, so this is on the safe side there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one rank.

    Attributes:
        name: as it is shown: ``24 GiB``, ``A100-80GB``, ``CPU engine``.
        kind: of which kernels and allocator the plan is.
        capacity_bytes: all of its memory.
        context_bytes: what CUDA, its libraries and kernels take outside torch's allocator.
        communication_bytes: what NCCL takes outside torch's allocator.
        card: whose speeds are known; None: only a size was given.
    """

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    capacity_bytes: int
    context_bytes: int = CONTEXT_BYTES
    communication_bytes: int = COMMUNICATION_BYTES
    card: Card | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that torch's allocator can have."""
        return max(0, self.capacity_bytes - self.context_bytes - self.communication_bytes)


def gpu(
    text: str,
    *,
    world_size: int,
    what: str = "--gpu-memory",
    context_bytes: int | None = None,
    communication_bytes: int | None = None,
) -> Device:
    """Return the GPU that a size or a card's name means.

    Args:
        text: ``24GiB``, or ``A100-80GB``.
        world_size: ranks; one by itself needs no NCCL.
        what: the option it was typed for, named in errors.
        context_bytes: in place of what CUDA's context usually takes.
        communication_bytes: in place of what NCCL usually takes.

    Raises:
        UsageError: if it is neither, or leaves nothing for tensors.
    """
    is_size = re.match(r"\s*-?[\d.]+\s*[KMGT](i?B)?\s*$", text, re.IGNORECASE)
    card = None if is_size else find_card(text, what=what)
    capacity = parse_bytes(text, what=what) if card is None else card.memory_bytes
    if context_bytes is None:
        context_bytes = CONTEXT_BYTES
    if communication_bytes is None:
        communication_bytes = COMMUNICATION_BYTES if world_size > 1 else 0
    outside = context_bytes + communication_bytes
    if capacity <= outside:
        raise UsageError(
            f"{what} {bytes_text(capacity)} leaves nothing for tensors: CUDA and NCCL take "
            f"{bytes_text(outside)}; type a size above that, such as {what} 24GiB"
        )
    return Device(
        name=bytes_text(capacity).replace(".0 ", " ") if card is None else card.name,
        capacity_bytes=capacity,
        context_bytes=context_bytes,
        communication_bytes=communication_bytes,
        card=card,
    )


def cpu_engine(limit_bytes: int) -> Device:
    """Return a CPU engine's memory, all of which is there for tensors.

    Args:
        limit_bytes: what the engine may allocate.
    """
    return Device(
        name="CPU engine",
        kind="cpu",
        capacity_bytes=limit_bytes,
        context_bytes=0,
        communication_bytes=0,
    )
