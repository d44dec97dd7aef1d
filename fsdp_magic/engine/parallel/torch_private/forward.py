"""ENGINE: gathering and freeing around forwards, and uses outside of any."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_magic.engine.parallel.torch_private.units import groups_of


def gathered_around(
    unit: Any, module: nn.Module, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function of a module's class that gathers the unit the module's parameters are in.

    While the unit is in its own forward the method is called as it is; so it is where backward
    computes that again. Else the unit's forward begins before it and ends after it, as torch's
    ``register_fsdp_forward_method`` does.

    Args:
        unit: the FSDP unit that holds the module's parameters.
        module: the unit or a part of it; of any other instance the function is called as it is.
        function: of the module's class.
    """
    state, own = unit._get_fsdp_state(), id(module)
    holder = weakref.ref(unit)
    is_by_itself = True

    @functools.wraps(function)
    def gathering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_by_itself
        if torch.compiler.is_compiling():  # a part of a unit that is in its forward
            return function(self, *args, **kwargs)
        if id(self) != own:  # a deep copy has this method too, but none of the unit's parameters
            return function(self, *args, **kwargs)
        if state._training_state is TrainingState.PRE_BACKWARD and not is_by_itself:
            _gather(state)  # torch would cast what it is given and returns, as it did not before
            return function(self, *args, **kwargs)
        is_by_itself = state._training_state is not TrainingState.FORWARD
        if not is_by_itself:
            return function(self, *args, **kwargs)
        unit = holder()
        try:
            args, kwargs = state._pre_forward(unit, args, kwargs)
            out = state._post_forward(unit, args, function(self, *args, **kwargs))
        except BaseException:
            _leave_forward(state)
            raise
        free_after_inference(unit)
        return out

    return gathering


def _gather(state: Any) -> None:
    """Have the parameters of a unit whole, if an earlier end of its backward has freed them."""
    for group in groups_of(state):
        if not group.is_unsharded:
            group.unshard()
            group.wait_for_unshard()


def _leave_forward(state: Any) -> None:
    if state._training_state is not TrainingState.FORWARD:
        return
    state._training_state = TrainingState.IDLE
    for group in groups_of(state):
        group._training_state = TrainingState.IDLE
    if state._state_ctx.iter_forward_root is state:
        state._state_ctx.iter_forward_root = None


def free_after_inference(unit: Any) -> None:
    """Free what a forward without gradients gathered, if this unit's was the outermost.

    Nothing else would: torch frees the root in backward, and under ``shard_grad_op`` all units.
    """
    if torch.is_grad_enabled():
        return
    context = unit._get_fsdp_state()._state_ctx
    if context.iter_forward_root is not None:
        return
    for state in context.all_states:
        for group in groups_of(state):
            idle = group._training_state is TrainingState.IDLE
            if idle and group.reshard_after_backward and not group.is_sharded:
                group.reshard()  # unless it is held gathered


@contextmanager
def gathered_again_in_backward(groups: list[Any]) -> Iterator[None]:
    """Let gathered parameters that a loss uses directly inside be there in its backward."""
    holders = {
        tensor.untyped_storage()._cdata: group
        for group in groups
        for parameter in group.fsdp_params
        for tensor in parameter.all_gather_outputs
    }

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        return tensor, holders.get(tensor.untyped_storage()._cdata) if plain else None

    def unpack(packed: tuple[torch.Tensor, Any]) -> torch.Tensor:
        tensor, group = packed
        if group is not None and not group.is_unsharded:
            group.unshard()
            group.wait_for_unshard()
        return tensor

    for group in groups if torch.is_grad_enabled() else ():
        for parameter in group.fsdp_params:
            _begin_backward_at(parameter._unsharded_param, group)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _begin_backward_at(gathered: torch.Tensor, group: Any) -> None:
    """Let the next gradient of a gathered parameter begin the backward of its group.

    Else nothing would reduce it: torch begins at the outputs of a forward, and there was none.
    """
    if not gathered.requires_grad or getattr(gathered, "fsdp_magic_hook", None) is not None:
        return
    (state,) = {m._get_fsdp_state() for m in group.modules}

    def begin(_: torch.Tensor) -> None:
        gathered.fsdp_magic_hook.remove()  # type: ignore[attr-defined]
        gathered.fsdp_magic_hook = None  # type: ignore[attr-defined]
        state._training_state = TrainingState.PRE_BACKWARD
        state._register_root_post_backward_final_callback()
        group.pre_backward(False)

    gathered.fsdp_magic_hook = gathered.register_hook(begin)  # type: ignore[attr-defined, no-untyped-call]
