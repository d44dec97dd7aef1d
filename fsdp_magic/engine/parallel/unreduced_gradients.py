"""ENGINE: gradients of this rank alone, of parameters that every rank holds whole.

They are averaged together, so that a parameter that only some ranks used counts as zeros on the
others. An earlier backward left the same on every rank, and the mean of that is that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fsdp_magic.engine.collectives import UNITS
from fsdp_magic.engine.parallel.gradient_buckets import GradientReduction, buckets_of


class UnreducedGradients:
    """Which parameters have a gradient of this rank alone in theirs.

    Args:
        group: the ranks; for gradients only.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: set[int] = set()
        self._unsynced: Counter[int] = Counter()

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._pending

    def note(self, parameter: nn.Parameter) -> None:
        """Note that a gradient has arrived at a parameter."""
        self._pending.add(id(parameter))

    def clear(self) -> None:
        """Forget them: they are reduced."""
        self._pending.clear()

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients of parameters that are among them, and forget all."""
        for parameter in parameters:
            if parameter in self:
                parameter.grad = None
        self._pending.clear()

    @contextmanager
    def unsynced(self, parameters: Collection[int]) -> Iterator[None]:
        """Leave the gradients of parameters on this rank inside.

        Args:
            parameters: their ids.
        """
        self._unsynced.update(parameters)
        try:
            yield
        finally:
            self._unsynced.subtract(parameters)

    def is_synced(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of a parameter is to be averaged."""
        return self._unsynced[id(parameter)] <= 0

    @torch.no_grad()
    def average(self, parameters: Sequence[nn.Parameter], *, name: str) -> list[nn.Parameter]:
        """Average the gradients that are those of one rank alone, on any rank.

        Collective: every rank must call this.

        Args:
            parameters: as many on every rank.
            name: of the model, for who waits in one of its collectives.

        Returns:
            Those whose gradients were.
        """
        flags = torch.tensor([self._is_averaged(p) for p in parameters], dtype=torch.uint8)
        all_reduce = UNITS.naming(name, dist.all_reduce)
        all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        chosen = [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        GradientReduction(buckets_of(chosen[::-1]), name=name, group=self._group).finish()
        for parameter in chosen:
            assert parameter.grad is not None
            parameter.grad /= self._group.size()
        self._pending.difference_update(map(id, chosen))
        return chosen

    def _is_averaged(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None and parameter in self and self.is_synced(parameter)
