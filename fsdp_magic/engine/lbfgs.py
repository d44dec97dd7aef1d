"""ENGINE: LBFGS on sharded parameters.

torch's LBFGS flattens gradients into one vector and takes dot products of such vectors. A sharded
gradient cannot be flattened in place, so every rank gathers the whole vector and keeps the whole
history: exact, and not less memory than in one process. Its updates go back to the shards.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import LBFGS

from fsdp_magic.engine.parallel.zero1 import gather_stepped


def work_on_shards(optimizer: LBFGS) -> None:
    """Let an LBFGS read gradients from shards and write updates to them.

    Source: torch/optim/lbfgs.py, whose two methods these are; checked on 2.13.
    """
    optimizer._params = optimizer.param_groups[0]["params"]  # a list of its own, from before
    optimizer._gather_flat_grad = types.MethodType(_whole_gradient, optimizer)  # type: ignore[method-assign]
    optimizer._add_grad = types.MethodType(_add, optimizer)  # type: ignore[method-assign]


def _whole_gradient(self: Any) -> torch.Tensor:
    """Return the whole gradient as one vector, the same on every rank.

    Collective: every rank must call this.
    """
    parts = []
    for parameter in self._params:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        elif isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        parts.append(gradient.reshape(-1))
    return torch.cat(parts)


def _add(self: Any, step_size: float, direction: torch.Tensor) -> None:
    """Move the parameters along a whole direction."""
    first = 0
    for parameter in self._params:
        size = parameter.numel()
        update = direction[first : first + size].view(parameter.shape)
        first += size
        if isinstance(parameter, DTensor):
            # no source rank: every rank has the whole update and takes its part of it
            update = distribute_tensor(
                update, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.add_(update, alpha=step_size)
    gather_stepped(self)  # the next forward may come before the step is over
