"""ENGINE: optimizers and sharded parameters.

An optimizer made before the model was sharded holds parameters that are no longer trained. It is
re-pointed in place: the same object, the same groups with their own learning rates and decay,
the same hooks and schedulers; its state is cut like the parameters it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.parallel.torch_private import shard_like


def repoint(optimizer: Optimizer, replaced: Mapping[int, nn.Parameter]) -> None:
    """Put new parameters where an optimizer holds the ones they replace.

    Args:
        optimizer: changed in place.
        replaced: the new parameter by the id of the old one.
    """
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(p), p) for p in group["params"]]
    for old in [parameter for parameter in optimizer.state if id(parameter) in replaced]:
        new = replaced[id(old)]
        state = optimizer.state.pop(old)
        optimizer.state[new] = {name: _cut_like(value, new) for name, value in state.items()}


def refuse_shared(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise if a parameter is in two optimizers, which would both step it."""
    holder: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for parameter in parameters_of(optimizer):
            other = holder.setdefault(id(parameter), name)
            if other != name:
                raise FsdpError(
                    f"a parameter of shape {tuple(parameter.shape)} is in two optimizers, {other} "
                    f"and {name}; keep it in one, or delete the one that is no longer used: "
                    f"del {other}"
                )


def refuse_unfit(optimizers: Mapping[str, Optimizer], *, calls_closures: bool = False) -> None:
    """Raise if an optimizer cannot work on shards, or not without a person's own loop.

    Args:
        optimizers: by name.
        calls_closures: whether the person's code steps them, and may pass a closure.
    """
    for name, optimizer in optimizers.items():
        classes = {kind.__name__ for kind in type(optimizer).__mro__}
        sharded = any(isinstance(p, DTensor) for p in parameters_of(optimizer))
        if "Adafactor" in classes and sharded:
            raise FsdpError(
                f"{name} is an Adafactor, which averages over whole columns, and a rank holds "
                f"only some rows of a sharded parameter; type: {name} = "
                "torch.optim.AdamW(model.parameters(), lr=1e-4), or %%fsdp_model --strategy ddp, "
                "which shards none"
            )
        if "LBFGS" in classes and not calls_closures:
            raise FsdpError(
                f"{name} is an LBFGS, which runs the cell several times a step; add --manual and "
                f"call {name}.step(closure) in the cell"
            )


def with_gradients(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that hold a parameter with a gradient; the others are not stepped."""
    return [o for o in optimizers if any(p.grad is not None for p in parameters_of(o))]


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return every parameter that an optimizer holds."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _cut_like(value: Any, parameter: nn.Parameter) -> Any:
    """Return a state tensor cut like its parameter; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor):
        return value
    if tuple(value.shape) != tuple(parameter.shape):
        return value
    return cut_like(value, parameter)


def cut_like(whole: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return this rank's part of a tensor that every rank has whole, where a parameter's part is.

    Args:
        whole: of the parameter's global shape.
        parameter: sharded; on the host if it is offloaded.
    """
    # no source rank: every rank takes its part of what it has
    cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shard_like(cut.to_local().to(parameter.to_local().device), parameter)
