"""ENGINE: ``fsdp`` as a cell finds it in a plan: one rank computes, the others are not asked.

What comes back has the shapes that it has in a run. A collective of the person's own would wait
for ranks that never come: it is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fsdp_magic.engine.fsdp_in_cells import FsdpInCells

REFUSAL = (
    "the cell makes a collective of its own, and a plan runs on one rank; use fsdp.mean(x) or "
    "fsdp.gather(x), or write model and loss without it into a %%fsdp_plan cell"
)
"""What a person is told whose cell asks the other ranks."""


class FsdpAlone(FsdpInCells):
    """``fsdp`` where every other rank is taken to have what this one has.

    Args:
        rank: this rank.
        world_size: number of ranks.
    """

    def stop(self) -> None:
        """Go on: a plan is of one step."""

    def mean(self, x: Any) -> Any:
        """Return what takes the memory of a mean."""
        if not isinstance(x, torch.Tensor):
            return x
        kind = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
        return x.to(kind).clone() / self._world_size

    def gather(self, x: Any) -> Any:
        """Return what takes the memory of all ranks' rows."""
        if not isinstance(x, torch.Tensor):
            return [x] * self._world_size
        rows = x.reshape(1) if x.ndim == 0 else x
        return torch.cat([rows] * self._world_size)

    def whole(self, tensor: Any) -> Any:
        """Return a tensor, which is whole."""
        return tensor

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing: parameters are whole."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing: gradients go nowhere."""
        return nullcontext()
