"""ENGINE: the object ``fsdp`` that cells find: what a person can ask of the ranks together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.collectives import UNITS
from fsdp_magic.engine.parallel import gathering


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let the collectives of a method be told under the name that a person typed."""
    return UNITS.naming(f"fsdp.{method.__name__}", method)


class FsdpInCells:
    """``fsdp`` in a cell.

    Args:
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._in_run = False
        self._stopping = False

    def __repr__(self) -> str:
        return "<fsdp: stop(), mean(x), gather(x), whole(tensor), unsharded(model), no_sync(model)>"

    def stop(self) -> None:
        """End the run on all ranks after this step; it counts as done."""
        if not self._in_run:
            raise FsdpError("fsdp.stop() ends a training run after its step; none is running here")
        self._stopping = True

    @_named
    def mean(self, x: Any) -> Any:
        """Return the mean of a number or tensor over the ranks; gradients flow through it.

        Collective: every rank must call this.

        Args:
            x: of the same shape on every rank.
        """
        x = _whole(x)
        kinds = self._kinds(x)
        if len(set(kinds)) > 1:
            raise FsdpError(
                f"fsdp.mean(x) takes x of one shape and type on all ranks; they have "
                f"{', '.join(dict.fromkeys(kinds))}"
            )
        if isinstance(x, torch.Tensor):
            kind = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
            mean: torch.Tensor = _Mean.apply(x.to(kind), self._world_size)  # type: ignore[no-untyped-call]
            return mean
        total = torch.tensor(float(x), dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / self._world_size

    @_named
    def gather(self, x: Any) -> Any:
        """Return the tensors of all ranks, one after the other along dim 0.

        Ranks may differ in the length of dim 0. Gradients flow back to the rank that a row came
        from, added up over the ranks that used it. Anything but a tensor comes as a list.

        Collective: every rank must call this.
        """
        x = _whole(x)
        if isinstance(x, torch.Tensor) and x.ndim == 0:
            x = x.reshape(1)
        rows = len(x) if isinstance(x, torch.Tensor) else None
        ranks: list[Any] = [None] * self._world_size
        dist.all_gather_object(ranks, (rows, _kind(x[:0] if rows is not None else x)))
        if rows is None and all(theirs is None for theirs, _ in ranks):
            values: list[Any] = [None] * self._world_size
            dist.all_gather_object(values, x)
            return values
        kinds = [kind for _, kind in ranks]
        if len(set(kinds)) > 1:
            raise FsdpError(
                "fsdp.gather(x) takes tensors that differ in dim 0 only; the ranks have "
                f"{', '.join(dict.fromkeys(kinds))} (dim 0 left out)"
            )
        sizes = [theirs for theirs, _ in ranks]
        gathered: torch.Tensor = _Gather.apply(x, sizes, self._rank)  # type: ignore[no-untyped-call]
        return gathered

    @_named
    def whole(self, tensor: Any) -> Any:
        """Return a sharded tensor (a parameter, ``parameter.grad``) whole; others as they are.

        Collective: every rank must call this.
        """
        return _whole(tensor)

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:
        """Have a model's parameters whole inside; what is written to them is kept.

        Collective: every rank must call this.
        """
        return gathering.unsharded(model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Leave gradients on each rank inside, to be reduced by the next backward outside."""
        return gathering.no_sync(model)

    def _kinds(self, x: Any) -> list[str]:
        """Return what each rank has; unlike tensors in a collective would end the engines.

        Collective: every rank must call this.
        """
        kinds: list[Any] = [None] * self._world_size
        dist.all_gather_object(kinds, _kind(x))
        return kinds

    # -- for the run

    def begin_run(self) -> None:
        """Let ``stop`` work from here on."""
        self._in_run, self._stopping = True, False

    def end_run(self) -> None:
        """Refuse ``stop`` from here on."""
        self._in_run = False

    @property
    def stopping(self) -> bool:
        """Whether the cell called ``stop``."""
        return self._stopping


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def _kind(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return "a number" if isinstance(x, (int, float)) else type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        total = x.clone()
        dist.all_reduce(total)
        return total / ranks

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient / ctx.ranks, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
        ctx.first, ctx.rows = sum(sizes[:rank]), sizes[rank]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient[ctx.first : ctx.first + ctx.rows], None, None
