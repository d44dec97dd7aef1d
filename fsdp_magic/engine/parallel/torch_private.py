"""ENGINE: the private names of torch that we need, in one place.

Checked on torch 2.13.0. ``reset_iter_state`` is public there; for 2.11 and 2.12, which lack it,
the fallback does what it does, after their source (torch/distributed/fsdp/_fully_shard).
A test in ``tests/engines`` fails when one of them moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

_WORKER_GRACE_SECONDS = 0.5


def units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each FSDP unit of a model: its dotted name and the module."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def parameter_groups(unit: Any) -> list[Any]:
    """Return the parameter groups of one FSDP unit (one, or none for a unit without any)."""
    state = unit._get_fsdp_state()
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


def settle_root(root: Any) -> None:
    """Make a module the root of its units now, not at its first forward.

    Else the first forward of anything decides, and a block that is called by itself before the
    whole model would become a root of its own.
    """
    root._get_fsdp_state()._lazy_init()


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
