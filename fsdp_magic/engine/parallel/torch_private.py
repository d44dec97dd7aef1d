"""ENGINE: the private names of torch that we need, in one place.

Checked on torch 2.13.0. ``reset_iter_state`` is public there; for 2.11 and 2.12, which lack it,
the fallback does what it does, after their source (torch/distributed/fsdp/_fully_shard).
A test in ``tests/engines`` fails when one of them moves.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

_WORKER_GRACE_SECONDS = 0.5


def units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each FSDP unit of a model: its dotted name and the module."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def parameter_groups(unit: Any) -> list[Any]:
    """Return the parameter groups of one FSDP unit (one, or none for a unit without any)."""
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # plural since 2.12
    if groups is None:
        single = getattr(state, "_fsdp_param_group", None)
        groups = [] if single is None else [single]
    return list(groups)


def sharded_of_unsharded(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the sharded parameter by the id of the one a forward sees in its place.

    An optimizer built between a forward and the next reshard holds the latter, and would train
    nothing.
    """
    return {
        id(parameter._unsharded_param): parameter.sharded_param
        for _, unit in units(model)
        for group in parameter_groups(unit)
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    }


def unsharded_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the gathered parameters that gradients of a model arrive at, of units that ran."""
    for _, unit in units(model):
        for group in parameter_groups(unit):
            for parameter in group.fsdp_params:
                leaf = getattr(parameter, "_unsharded_param", None)
                if leaf is not None and leaf.requires_grad:
                    yield leaf


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


def gathered_around(
    unit: Any, module: nn.Module, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function of a module's class that gathers the unit the module's parameters are in.

    While the unit is in its own forward the method is called as it is. Else the unit's forward
    begins before it and ends after it, as torch's ``register_fsdp_forward_method`` does.

    Args:
        unit: the FSDP unit that holds the module's parameters.
        module: the unit or a part of it; of any other instance the function is called as it is.
        function: of the module's class.
    """
    state, own = unit._get_fsdp_state(), id(module)
    holder = weakref.ref(unit)

    @functools.wraps(function)
    def gathering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # a deep copy of the module has this method too, but none of the unit's parameters
        if state._training_state is TrainingState.FORWARD or id(self) != own:
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


def _leave_forward(state: Any) -> None:
    if state._training_state is not TrainingState.FORWARD:
        return
    state._training_state = TrainingState.IDLE
    for group in _groups_of(state):
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
        for group in _groups_of(state):
            idle = group._training_state is TrainingState.IDLE
            if idle and group.reshard_after_backward and not group.is_sharded:
                group.reshard()  # unless it is held gathered


@contextmanager
def held_gathered(group: Any) -> Iterator[None]:
    """Gather a group's parameters, and let no forward or backward inside free them."""
    mesh, backward = group.post_forward_mesh_info, group.reshard_after_backward
    group.post_forward_mesh_info, group.reshard_after_backward = None, False
    try:
        group.unshard()
        group.wait_for_unshard()
        yield
    finally:
        group.post_forward_mesh_info, group.reshard_after_backward = mesh, backward
        group._to_sharded()


def keep_writes(group: Any) -> None:
    """Copy what was written into gathered parameters to the shards."""
    for parameter in group.fsdp_params:
        shard = parameter.sharded_param.detach().to_local()
        parts = parameter._unsharded_param.detach().chunk(parameter.mesh_info.shard_mesh_size)
        rank = parameter.mesh_info.shard_mesh_rank
        if rank >= len(parts) or torch.equal(parts[rank].to(shard.dtype), shard):
            continue
        shard.copy_(parts[rank])


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


def clear_gradients(group: Any, modules: set[nn.Module]) -> None:
    """Drop what a group's parameters in some modules have of gradients, gathered and sharded."""
    for parameter in group.fsdp_params:
        info = parameter._module_info
        if modules.isdisjoint((info.module, *info.shared_modules)):
            continue
        parameter.sharded_param.grad = None
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def settle_root(root: Any) -> None:
    """Make a module the root of its units now, not at its first forward.

    Else the first forward of anything decides, and a block that is called by itself before the
    whole model would become a root of its own.
    """
    root._get_fsdp_state()._lazy_init()


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
            for group in _groups_of(each):
                reduced = group._training_state is TrainingState.POST_BACKWARD
                if reduced and group.is_unsharded and group.reshard_after_backward:
                    group._training_state = TrainingState.PRE_BACKWARD
        final_callback()

    state._root_post_backward_final_callback = final


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


def read_scalars_whole() -> None:
    """Let ``.item()``, ``float()`` and ``bool()`` of a sharded tensor give the whole value.

    torch gives each rank its own part of a sum that is not yet added up. Reading becomes
    collective: every rank must do it.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _read_whole


def _read_whole(
    op_call: Any,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    (tensor,) = args
    assert isinstance(tensor, DTensor)
    whole: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return op_call(whole, **kwargs)


def align_group_count() -> None:
    """Let all ranks count process groups alike, so that the next ``new_group`` meets.

    torch names a group by how many this rank has made, and a failure may have kept some ranks
    from making one.

    Collective: every rank must call this.
    """
    count = torch.tensor([distributed_c10d._world.group_count])
    distributed_c10d.all_reduce(count, op=distributed_c10d.ReduceOp.MAX)
    distributed_c10d._world.group_count = int(count)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor holds on this rank; of a DTensor, its shard's."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel() * local.element_size())


def shut_down_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator now, not when it is collected.

    A failed cell's frames may keep it for a while; the workers would live on as long. torch's own
    way waits 5 s for each that is busy in the data set; these get half a second together.

    Source: ``_MultiProcessingDataLoaderIter._shutdown_workers`` (torch/utils/data/dataloader.py).
    """
    if iterator._shutdown:
        return
    # from here on a worker that dies is no error
    torch._C._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    iterator._workers_done_event.set()
    for number, alive in enumerate(iterator._workers_status):
        if alive:
            iterator._mark_worker_as_unavailable(number, shutdown=True)
    deadline = time.monotonic() + _WORKER_GRACE_SECONDS
    for worker in iterator._workers:
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
    iterator._shutdown_workers()
