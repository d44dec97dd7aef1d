"""ENGINE: the gradient of a step as a whole: reduced, measured, clipped, cleared.

Sharded gradients are reduced over the ranks during backward. Parameters that every rank holds
whole are reduced here. The norm is that of the whole gradient: one number per shard, one scalar
reduction over the ranks; it stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6
"""Source: torch.nn.utils.clip_grad_norm_, which adds it to the norm it divides by."""


def reduce_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Add the gradients of whole parameters up over the ranks.

    One that is missing on some ranks counts as zero there; one that is missing on all stays so.

    Collective: every rank must call this.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for parameter, anywhere in zip(trained, used.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def total_norm(parameters: Sequence[torch.Tensor], *, world_size: int) -> torch.Tensor:
    """Return the 2-norm of the whole gradient, on the device.

    Collective: every rank must call this.

    Args:
        parameters: sharded and whole ones.
        world_size: ranks that hold a copy of each whole parameter.

    Returns:
        A 0-dim tensor, the same on every rank.
    """
    sharded = [_local(p.grad) for p in parameters if isinstance(p.grad, DTensor)]
    whole = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    # every rank adds its copy of a whole gradient's square, so each adds its part of it
    square = _square(sharded, parameters) + _square(whole, parameters) / world_size
    dist.all_reduce(square)
    return square.sqrt()


def clip(parameters: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradient so that its norm is at most ``max_norm``, without reading the norm.

    Source: torch.nn.utils.clip_grad_norm_, whose factor this is.
    """
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    for same in _by_dtype(gradients):
        torch._foreach_mul_(same, factor.to(same[0].dtype))


def clear(parameters: Iterable[torch.Tensor]) -> None:
    """Drop every gradient."""
    for parameter in parameters:
        parameter.grad = None


def _square(gradients: list[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of gradients, in at least float32."""
    if not gradients:
        first = parameters[0]
        kind = torch.promote_types(first.dtype, torch.float32)
        return torch.zeros((), dtype=kind, device=first.device)
    norms = [n for same in _by_dtype(gradients) for n in torch._foreach_norm(same, 2.0)]
    kind = torch.promote_types(norms[0].dtype, torch.float32)
    return torch.stack([norm.to(kind) for norm in norms]).square().sum()


def _by_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
