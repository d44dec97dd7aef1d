"""ENGINE: what a backward reduces, and forgetting one that failed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_magic.engine.parallel.torch_private.units import groups_of, parameter_groups, units

BACKWARD_FUNCTION = "_engine_run_backward"
"""The function that the main thread is in while a backward runs (torch/autograd/graph.py)."""


def run_backward(loss: torch.Tensor) -> None:
    """Run backward with every mode still on, also for what is computed again in it.

    ``Tensor.backward`` is a function of torch, so a torch function mode is off while it runs.
    """
    torch.autograd.graph._engine_run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def forget_iteration(model: nn.Module) -> None:
    """Forget a forward or backward that an exception ended.

    Without it, gradients that were under way would be added to those of the next backward.
    """
    for _, unit in units(model):
        for group in parameter_groups(unit):
            group._all_gather_result = None  # its transport is gone: never wait for it
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
    for _, root in units(model):
        # None: no forward ever began, so there is nothing to forget
        if root._get_fsdp_state()._is_root:
            _reset_iteration_state(root)


def _reset_iteration_state(root: Any) -> None:
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()
    context = state._comm_ctx
    context.all_gather_state = None
    context.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._training_state = type(each._training_state).IDLE
        for group in parameter_groups(root):
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def backward_number() -> int:
    """Return the number of the backward that is running in this thread, of nested ones the inner.

    Source: the id of autograd's graph task, as torch/utils/checkpoint.py uses it.
    """
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward that is running ends without an exception.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, which ends its own that way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def count_missing_as_zero(unit: Any, used: set[int]) -> None:
    """Let a parameter without a gradient on this rank count as zeros when a unit is reduced.

    Else ranks that use different parameters of a unit would add up gradients of different
    parameters.

    Args:
        unit: an FSDP unit.
        used: where the ids of sharded parameters that did get a gradient are put.
    """
    for group in parameter_groups(unit):
        knows_zeros = hasattr(group, "reduce_scatter_unused_params")  # since 2.13
        if knows_zeros:
            group.reduce_scatter_unused_params = True
        group.post_backward = _noting(group.post_backward, group, used, fills=not knows_zeros)


def _noting(
    post_backward: Callable[..., None], group: Any, used: set[int], *, fills: bool
) -> Callable[..., None]:
    """Return a unit's reduction that first notes which parameters have a gradient."""

    @functools.wraps(post_backward)
    def noting(*unused: Any) -> None:
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is None or not gathered.requires_grad:
                continue
            if gathered.grad is not None or parameter.unsharded_accumulated_grad is not None:
                used.add(id(parameter.sharded_param))
            elif fills and group.reduce_grads:
                gathered.grad = torch.zeros_like(gathered)
        post_backward(*unused)

    return noting


def reduce_what_came_late(unit: Any) -> None:
    """Reduce a unit once more at the end of a backward if it was gathered after its reduction.

    A reentrant checkpoint does that: it runs the unit's forward within backward, where torch
    registers nothing, and the gradients would be added to those of the next step.
    """
    state = unit._get_fsdp_state()
    final_callback = state._root_post_backward_final_callback

    @functools.wraps(final_callback)
    def final() -> None:
        for each in state._state_ctx.all_states:
            for group in groups_of(each):
                reduced = group._training_state is TrainingState.POST_BACKWARD
                if reduced and group.is_unsharded and group.reshard_after_backward:
                    group._training_state = TrainingState.PRE_BACKWARD
        final_callback()

    state._root_post_backward_final_callback = final


def call_after_backward(unit: Any, callback: Callable[[], None]) -> None:
    """Call a function at the end of every backward that reaches the model of a unit.

    It is called once a backward if it is given to all units: torch asks the unit that is reached
    first.
    """
    state = unit._get_fsdp_state()
    final_callback = state._root_post_backward_final_callback

    @functools.wraps(final_callback)
    def final() -> None:
        final_callback()
        callback()

    state._root_post_backward_final_callback = final


def is_in_backward(root: Any) -> bool:
    """Return whether a backward has reached a sharded model and not ended yet."""
    return bool(root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)
