"""ENGINE: all ranks begin with rank 0's tensors, compared by checksum."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.raw_bytes import raw_bytes
from fsdp_magic.engine.world import World

Named = Sequence[tuple[str, torch.Tensor]]


def take_from_rank_0(named: Named, *, built: str, world: World) -> bool:
    """Give every rank rank 0's tensors, if they differ.

    Collective: every rank must call this.

    Args:
        named: tensors by name, whole on every rank.
        built: what they are together.
        world: the ranks.

    Returns:
        Whether any differed.

    Raises:
        FsdpError: if the ranks' names, shapes or dtypes differ.
    """
    sums: list[Any] = [None] * world.world_size
    dist.all_gather_object(sums, [(name, *_checksum(tensor)) for name, tensor in named])
    if all(other == sums[0] for other in sums):
        return False
    _refuse_other_shapes(built, sums)
    for _, tensor in named:
        dist.broadcast(tensor.data, src=0)
    return True


def build_as_rank_0(named: Named, *, name: str, world: World) -> list[str]:
    """Give every rank rank 0's weights and buffers of a model, if they differ.

    Collective: every rank must call this.

    Args:
        named: tensors by name, whole on every rank.
        name: of the model.
        world: the ranks.

    Returns:
        A sentence, if they differed.
    """
    if not take_from_rank_0(named, built=name, world=world):
        return []
    return [f"the ranks had built {name} differently; all have rank 0's weights now"]


def _refuse_other_shapes(model: str, ranks: list[list[tuple[Any, ...]]]) -> None:
    """Raise, naming the first difference, if ranks built models of different structure."""
    for rank, tensors in enumerate(ranks):
        ours, theirs = ([entry[:-1] for entry in each] for each in (ranks[0], tensors))
        if ours == theirs:
            continue
        pairs = itertools.zip_longest(ours, theirs, fillvalue=("nothing", "", ""))
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise FsdpError(
            f"the ranks built {model} differently: rank 0 has {first[0]} {first[1]} {first[2]}, "
            f"rank {rank} {second[0]} {second[1]} {second[2]}; build it alike on every rank"
        )


def _checksum(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return shape, dtype and a checksum over the bytes of a tensor."""
    content = tensor.detach().contiguous().cpu()
    return tuple(tensor.shape), tensor.dtype, zlib.crc32(raw_bytes(content))
