"""ENGINE: optimizer state made before the step that needs it, so that a step allocates none.

An optimizer allocates its state inside its first ``step()``. If a rank ran out of memory there,
others would have stepped already. So what is missing is made before the last vote. Only torch's
own optimizers are known well enough; others make theirs themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from fsdp_magic.engine.parallel import torch_private


def make_missing(optimizers: Iterable[Optimizer]) -> None:
    """Make the state of parameters that have a gradient and no state yet.

    Once every parameter has some, this is a comparison of two numbers.
    """
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if len(optimizer.state) >= sum(len(group["params"]) for group in groups):
            continue
        for group in groups:
            if _keeps_state(optimizer, group):
                state = optimizer.state
                lacking = [p for p in group["params"] if p.grad is not None and p not in state]
                if lacking:
                    _make(optimizer, group, lacking)


def _keeps_state(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether we know which state an optimizer will make for a group."""
    if type(optimizer) is SGD:
        # the first step leaves dampening out, and a momentum of zero would not
        return bool(group["momentum"]) and not group["dampening"]
    return torch_private.makes_state(optimizer)


@torch.no_grad()
def _make(optimizer: Optimizer, group: dict[str, Any], lacking: Sequence[torch.Tensor]) -> None:
    """Make the state of some parameters, or of none of them."""
    try:
        if type(optimizer) is SGD:
            for parameter in lacking:
                assert parameter.grad is not None
                # zero, to which the first step adds the gradient that it would copy
                zeros = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = zeros
        else:
            torch_private.make_state(optimizer, group)
    except BaseException:
        for parameter in lacking:  # half a state would be taken for a whole one
            optimizer.state.pop(parameter, None)
        raise
