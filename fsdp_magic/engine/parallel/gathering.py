"""ENGINE: when the parameters of a sharded model are whole, and when they are shards.

After backward they are shards. Between a forward with gradients and its backward torch keeps the
root's whole (under ``shard_grad_op`` every unit's); what is written into them then is lost. After
a forward without gradients they are shards again (``methods.py``). A model that no optimizer
trains is never gathered beyond a forward, so a target network or a moving average that is
updated between two forwards is used as updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.parallel import torch_private, whole_models
from fsdp_magic.engine.parallel.methods import owner

_HELD: list[nn.Module] = []
"""The modules that are held whole at the moment."""


def is_held() -> bool:
    """Return whether any model is held whole at the moment."""
    return bool(_HELD)


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Have whole, plain parameters inside; what is written into them is kept.

    They may be used in a loss: their gradients are those of a forward. What a rank writes reaches
    the part that it holds, so all must write the same.

    Collective: every rank must call this, and a backward that needs them.

    Raises:
        FsdpError: if it is not a module.
    """
    groups = [group for unit in _units(module) for group in torch_private.parameter_groups(unit)]
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(torch_private.held_gathered(group))
        stack.enter_context(torch_private.gathered_again_in_backward(groups))
        _HELD.append(module)
        stack.callback(_HELD.remove, module)
        yield
        for group in groups:
            torch_private.keep_writes(group)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Add gradients up on this rank only inside; the next backward outside reduces the sum.

    Raises:
        FsdpError: if it is not a module.
    """
    units = _units(module)
    parameters = {id(parameter) for parameter in module.parameters()}
    with ExitStack() as stack:
        stack.enter_context(whole_models.unsynced(parameters))
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
            stack.callback(unit.set_requires_gradient_sync, True, recurse=False)
        yield


def clear_gradients(module: nn.Module) -> None:
    """Drop every gradient of a module: of its shards and of what is gathered of them.

    ``module.zero_grad()`` alone sees only those of the two that are in place at the moment.
    """
    parts = set(module.modules())
    for unit in _units(module):
        for group in torch_private.parameter_groups(unit):
            torch_private.clear_gradients(group, parts)
    for parameter in module.parameters():
        parameter.grad = None


def _units(module: Any) -> Sequence[Any]:
    """Return the units in a module, or the one that it is a part of."""
    if not isinstance(module, nn.Module):
        raise FsdpError(f"{type(module).__name__} is no torch module; give the model itself")
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    holder = None if isinstance(module, FSDPModule) else owner(module)
    return units if holder is None else [holder, *units]
