"""ENGINE: the units of a sharded model, their parameters and what is in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_magic.engine.collectives import UNITS


def units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each FSDP unit of a model: its dotted name and the module."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def parameter_groups(unit: Any) -> list[Any]:
    """Return the parameter groups of one FSDP unit (one, or none for a unit without any)."""
    return groups_of(unit._get_fsdp_state())


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of the state of one FSDP unit."""
    groups = getattr(state, "_fsdp_param_groups", None)  # plural since 2.12
    if groups is None:
        single = getattr(state, "_fsdp_param_group", None)
        groups = [] if single is None else [single]
    return list(groups)


def name_in_collectives(unit: Any, name: str) -> None:
    """Let the collectives of a unit, its gathering and its reduction, carry its name."""
    for group in parameter_groups(unit):
        group.unshard = UNITS.naming(name, group.unshard)
        group.post_backward = UNITS.naming(name, group.post_backward)


def gather_outside_inference(unit: Any) -> None:
    """Let what a unit gathers first in inference mode be plain tensors, which can train later."""
    for group in parameter_groups(unit):
        group.unshard = _outside_inference(group.unshard)
        group.wait_for_unshard = _outside_inference(group.wait_for_unshard)


def _outside_inference(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> None:
        if not torch.is_inference_mode_enabled():
            function(*args, **kwargs)
            return
        with torch.inference_mode(False), torch.no_grad():  # the former alone would record
            function(*args, **kwargs)

    return outside


def unsharded_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the gathered parameters that gradients of a model arrive at, of units that ran."""
    for _, unit in units(model):
        for group in parameter_groups(unit):
            for parameter in group.fsdp_params:
                leaf = getattr(parameter, "_unsharded_param", None)
                if leaf is not None and leaf.requires_grad:
                    yield leaf


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


def set_divide_factor(model: nn.Module, factor: float | None) -> None:
    """Let reductions divide the sum of gradients by a number; None: by the number of ranks.

    By a division after a sum: gloo knows no premultiplied one. ``FSDPModule`` takes no None, and
    given the number of ranks torch divides twice where a shard is one rank's (foreach_reduce).
    """
    for _, unit in units(model):
        unit.set_force_sum_reduction_for_comms(True)
        for group in parameter_groups(unit):
            group.gradient_divide_factor = factor


def settle_root(root: Any) -> None:
    """Make a module the root of its units now, not at its first forward.

    Else the first forward of anything decides, and a block that is called by itself before the
    whole model would become a root of its own.
    """
    root._get_fsdp_state()._lazy_init()


def free(root: Any) -> None:
    """Free whatever a model has gathered, outside of its forward."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in groups_of(state):
            if not group.is_sharded:
                group.reshard()


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
        if rank >= len(parts):
            continue
        # gathered in a lower precision, what nobody wrote to is no longer what the shard holds
        written = parts[rank] != shard.to(parts[rank].dtype)
        if written.any():
            shard.copy_(torch.where(written, parts[rank].to(shard.dtype), shard))


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
