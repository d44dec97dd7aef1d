"""ENGINE: the gradient of a step as a whole: reduced, measured, scaled, clipped, cleared.

Sharded gradients are reduced over the ranks during backward. Parameters that every rank holds
whole are reduced here. The norm is that of the whole gradient: one number per shard, one scalar
reduction over the ranks; it stays on the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6
"""Source: torch.nn.utils.clip_grad_norm_, which adds it to the norm it divides by."""


def reduce_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Add the gradients of whole parameters up over the ranks; those without any stay so.

    Collective: every rank must call this, with gradients on the same parameters.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def measure(
    parameters: Sequence[torch.Tensor], *, world_size: int, weight: torch.Tensor | float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the 2-norm of the whole gradient, on the device.

    Collective: every rank must call this. Nothing is sent where every rank has all of it, and
    the same, as under ``ddp``.

    Args:
        parameters: sharded and whole ones.
        world_size: ranks that hold a copy of each whole parameter.
        weight: this rank's part of what the gradient is still to be divided by; None: nothing.

    Returns:
        The norm, and the weights of all ranks added up; 0-dim tensors, the same on every rank.
    """
    if weight is None and _is_whole(parameters, world_size):
        return _square([_local(p.grad) for p in parameters if p.grad is not None]).sqrt(), None
    square = square_of(parameters, world_size=world_size)
    if weight is None:
        dist.all_reduce(square)
        return square.sqrt(), None
    both = torch.stack([square.double(), torch.as_tensor(weight).to(square.device).double()])
    dist.all_reduce(both)
    norm, total = both[0].sqrt(), both[1]
    return torch.where(total == 0, torch.zeros_like(norm), norm / total), total


def square_of(parameters: Sequence[torch.Tensor], *, world_size: int) -> torch.Tensor:
    """Return this rank's part of the square of a gradient's norm; a 0-dim tensor."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            copies = _copies(parameter.grad, world_size)
            by_copies.setdefault(copies, []).append(_local(parameter.grad))
    # each rank that has a copy adds its square, so each adds its part of it
    squares = [_square(copied) / copies for copies, copied in by_copies.items()]
    return _sum(squares, parameters)


def scale(parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradient by a 0-dim tensor."""
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    for same in _by_kind(gradients):
        torch._foreach_mul_(same, factor.to(same[0]))


def clip(parameters: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradient so that its norm is at most ``max_norm``, without reading the norm.

    Source: torch.nn.utils.clip_grad_norm_, whose factor this is.
    """
    scale(parameters, torch.clamp(max_norm / (norm + _EPSILON), max=1.0))


def clear(parameters: Iterable[torch.Tensor]) -> None:
    """Drop every gradient."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def without_the_uncounted(
    leaves: Iterable[torch.Tensor], weight: torch.Tensor | float
) -> Iterator[None]:
    """Make the gradients of a backward inside zero if its loss counts nothing.

    A loss of weight 0 may be NaN (the mean over no token), and then so are its gradients: 0 × NaN
    is NaN. Backward still runs, because the other ranks reduce their gradients in it.

    Args:
        leaves: the tensors that gradients arrive at.
        weight: a number on the device is not read: its gradients choose there.
    """
    if not isinstance(weight, torch.Tensor) and weight:
        yield
        return

    def chosen(gradient: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(gradient)
        if not isinstance(weight, torch.Tensor):
            return zeros
        return torch.where(weight == 0, zeros, gradient)

    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_hook(chosen).remove)  # type: ignore[no-untyped-call]
        yield


def _copies(gradient: torch.Tensor, world_size: int) -> int:
    """Return how many ranks have the same part of a gradient as this one."""
    if not isinstance(gradient, DTensor):
        return world_size
    mesh = gradient.device_mesh
    sizes = [mesh.size(axis) for axis, p in enumerate(gradient.placements) if p.is_replicate()]
    return math.prod(sizes)


def _is_whole(parameters: Sequence[torch.Tensor], world_size: int) -> bool:
    """Return whether every rank has every gradient whole; the same on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return bool(gradients) and all(_copies(g, world_size) == world_size for g in gradients)


def _square(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of gradients, in at least float32."""
    parts = []
    for same in _by_kind(gradients):
        norms = torch.stack(torch._foreach_norm(same, 2.0))
        parts.append(norms.to(torch.promote_types(norms.dtype, torch.float32)).square().sum())
    return _sum(parts, gradients)


def _sum(parts: list[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of 0-dim tensors, in at least float32, on a device where there is one.

    Args:
        parts: of any device: the gradients of offloaded parameters are on the host.
        like: what they are of, if there are none.
    """
    if not parts:
        kind = torch.promote_types(like[0].dtype, torch.float32)
        return torch.zeros((), dtype=kind, device=like[0].device)
    kind = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    device = next((p.device for p in parts if p.device.type != "cpu"), parts[0].device)
    return torch.stack([part.to(device=device, dtype=kind) for part in parts]).sum()


def _by_kind(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists of one dtype and device each."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
