"""ENGINE: rows of parameters that each rank has updated, gathered into the whole parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_magic.core.placement import shard_rows
from fsdp_magic.engine.collectives import UNITS
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.gradient_buckets import BUCKET_BYTES, buckets_of
from fsdp_magic.engine.world import World


def rows_of(tensor: torch.Tensor, world: World, rank: int) -> torch.Tensor:
    """Return the rows of a whole tensor that a rank updates, as a view."""
    rows, size = len(tensor), world.world_size
    most = shard_rows(rows=rows, world_size=size, rank=0)
    first = min(rank * most, rows)
    return tensor[first : first + shard_rows(rows=rows, world_size=size, rank=rank)]


def own_rows(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Return the rows of a whole tensor that this rank updates, as a view."""
    return rows_of(tensor, world, world.rank)


@torch.no_grad()
def gather_rows(
    parameters: Sequence[nn.Parameter], *, name: str, group: dist.ProcessGroup, world: World
) -> None:
    """Have every rank's rows in the whole parameters.

    Large ones are gathered in place, small ones together.

    Collective: every rank must call this.

    Args:
        parameters: contiguous; the same on every rank.
        name: of the model, for who waits here.
        group: the ranks.
        world: says which rows are whose.
    """
    gather = UNITS.naming(name, _gather_in_place)
    together = UNITS.naming(name, _gather_together)
    for bucket in buckets_of(parameters):
        tensors = [parameter.detach() for parameter in bucket]
        if tensors[0].nbytes >= BUCKET_BYTES:
            gather(tensors[0], group, world)
        else:
            together(tensors, group, world)


def _gather_in_place(tensor: torch.Tensor, group: dist.ProcessGroup, world: World) -> None:
    parts = [rows_of(tensor, world, rank) for rank in range(world.world_size)]
    if len({len(part) for part in parts}) == 1:
        own = parts[world.rank].view(-1)
        torch_private.all_gather_single(tensor.view(-1), own, group=group)
        return
    for rank, part in enumerate(parts):  # each has its own size
        if len(part):
            dist.broadcast(part, group_src=rank, group=group)


def _gather_together(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, world: World
) -> None:
    ranks = list(zip(*(_rows_of_all(tensor, world) for tensor in tensors), strict=True))
    sizes = [part.numel() for part in ranks[0]]  # no rank has more
    gathered = tensors[0].new_empty(world.world_size, sum(sizes))

    def parts_in(rank: int) -> list[torch.Tensor]:
        slots = zip(torch.split(gathered[rank], sizes), sizes, ranks[rank], strict=True)
        return [
            (slot if part.numel() == size else slot[: part.numel()]).view(part.shape)
            for slot, size, part in slots
        ]

    torch._foreach_copy_(parts_in(world.rank), list(ranks[world.rank]))
    torch_private.all_gather_single(gathered.view(-1), gathered[world.rank], group=group)
    for rank, parts in enumerate(ranks):
        if rank != world.rank:
            torch._foreach_copy_(list(parts), parts_in(rank))


def _rows_of_all(tensor: torch.Tensor, world: World) -> list[torch.Tensor]:
    """Return the rows of each rank, as ``rows_of`` gives them, by one call."""
    parts = list(torch.chunk(tensor, world.world_size))
    return parts + [tensor[len(tensor) :]] * (world.world_size - len(parts))
