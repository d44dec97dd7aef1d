"""ENGINE: fully sharded data parallelism with FSDP2, whole or within groups of ranks.

A unit is what is gathered at once (``wrapping.py``); what is in none is the root's. ``full_shard``
and ``hybrid_shard`` free a unit's parameters after its forward and gather them again for backward
(ZeRO-3); ``shard_grad_op`` keeps them in between (ZeRO-2). Gradients are added up over
the ranks, not averaged, while our loop trains: each rank weighs its loss by its part of the
global batch, so their sum is the gradient of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_magic.core.placement import ParameterPlacement, Placement, shard_rows
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import cpu_offload, precision, torch_private
from fsdp_magic.engine.parallel.hybrid_shard import mesh_of
from fsdp_magic.engine.parallel.meta import InitialWeights, move
from fsdp_magic.engine.parallel.methods import (
    forget_calls,
    free_before_steps,
    gather_around_calls,
    note_calls,
)
from fsdp_magic.engine.parallel.pretrained import MAPPED
from fsdp_magic.engine.parallel.rank_zero import build_as_rank_0
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.unfit import refuse_lossy
from fsdp_magic.engine.parallel.unit_dtypes import of_one_dtype
from fsdp_magic.engine.parallel.whole_parts import WholeParts
from fsdp_magic.engine.parallel.wrapping import Units
from fsdp_magic.engine.world import World


class FsdpModel(ShardedModel):
    """A model that was spread with FSDP2.

    Attributes:
        whole: what of it every rank holds whole.
    """

    whole: WholeParts

    def placement(self) -> Placement:
        """Return where every parameter lives; the same on every rank, without communication."""
        unit_of = {
            id(parameter.sharded_param): name
            for name, unit in torch_private.units(self.module)
            for group in torch_private.parameter_groups(unit)
            for parameter in group.fsdp_params
        }
        mesh = mesh_of(self.spec, self._world)
        parameters = (
            _parameter_placement(name, parameter, unit_of.get(id(parameter), ""), mesh)
            for name, parameter in self.module.named_parameters()
        )
        return self.placed(parameters, replicas=mesh.size() // mesh.size(-1))

    def in_place_of_gathered(self) -> dict[int, nn.Parameter]:
        """Return the shard by the id of the parameter that a forward sees in its place."""
        return torch_private.sharded_of_unsharded(self.module)

    def reshard(self) -> None:
        """Free gathered parameters, so that the next forward and any optimizer see the shards."""
        for _, unit in torch_private.units(self.module):
            unit.reshard()

    def leave(self) -> None:
        """Forget which units gather the parts of the model."""
        forget_calls(self.module)
        self.whole.leave()

    def come_back(self) -> None:
        """Note it again."""
        note_calls(self.module)
        self.whole.come_back()

    def settle(self, trained: Collection[int]) -> None:
        """Let a model that no optimizer trains free its parameters after every forward.

        The others do as their strategy says.

        Args:
            trained: ids of the parameters that optimizers hold.
        """
        root = self.module
        is_trained = any(id(p) in trained for p in root.parameters())
        for _, unit in torch_private.units(root):
            frees = not is_trained or (self.strategy != "shard_grad_op" and unit is not root)
            unit.set_reshard_after_forward(frees, recurse=False)

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Add gradients up over the ranks inside, where FSDP2 would average them."""
        try:
            _set_divide_factor(self, 1.0)
            yield
        finally:
            _set_divide_factor(self, None)

    @contextmanager
    def reducing(self, *, is_last: bool) -> Iterator[None]:
        """Have one backward of a step inside, which reduces what it computes if it should.

        Args:
            is_last: whether it is the last one.
        """
        reduces = is_last or self.spec.accumulate_sync != "last"
        with self.whole.within_step():
            if reduces:
                yield
                return
            root: FSDPModule = self.module  # type: ignore[assignment]
            root.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                root.set_requires_gradient_sync(True)

    def reduce(self) -> None:
        """Do nothing: backward reduces."""

    def fill_missing(self, used: Collection[int]) -> None:
        """Do nothing: what is missing counts as zeros where a unit is reduced."""

    def updated(self) -> None:
        """Do nothing: the next forward gathers the shards, which were updated."""

    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield the gathered parameters that gradients of a backward arrive at."""
        return torch_private.unsharded_parameters(self.module)

    def forget_iteration(self) -> None:
        """Forget a forward or backward that an exception ended."""
        torch_private.forget_iteration(self.module)
        self.whole.forget_iteration()


def shard(
    module: nn.Module, *, name: str, spec: ModelSpec, world: World, units: Units
) -> tuple[FsdpModel, dict[int, nn.Parameter]]:
    """Spread a model over the ranks, in place.

    Collective: every rank must call this.

    Args:
        module: the model; the same on every rank, or rank 0's is taken.
        name: what it is bound to.
        spec: how.
        world: over whom.
        units: what is gathered together, inner ones first.

    Returns:
        The sharded model, and each new parameter by the id of the one it replaces.
    """
    model = FsdpModel(module, name=name, spec=spec, world=world)
    places = _places(module)
    cut = _cutter(model, world)
    initial = InitialWeights(module, name=name, world=world)
    refuse_lossy(module, name)
    ignored = _left_whole(module, spec)
    units = of_one_dtype(module, units, name=name, whole=ignored)
    _be_as_rank_0(model, world)
    for unit in units:
        ignored |= initial.give(*unit, whole=ignored)
        cut(list(unit) if len(unit) > 1 else unit[0], ignored, is_root=False)
        MAPPED.release(places)
    ignored |= initial.give(module, whole=ignored)
    initial.check()
    cut(module, ignored, is_root=True)
    torch_private.settle_root(module)
    _prepare(model)
    model.whole = WholeParts(model, world=world)
    return model, _replaced(model, places)


def _left_whole(module: nn.Module, spec: ModelSpec) -> set[nn.Parameter]:
    """Return what every rank holds whole: FSDP2 cuts no scalar, and nothing that is empty."""
    uncut = {p for p in module.parameters() if p.ndim == 0 or p.numel() == 0}
    return uncut | precision.kept_as_made(module, spec)


def _be_as_rank_0(model: FsdpModel, world: World) -> None:
    """Bring a model to the device, with rank 0's values and every parameter in one piece.

    Collective: every rank must call this.
    """
    module = model.module
    move(module, world.device)
    named = [*module.named_parameters(), *module.named_buffers()]
    named = [(dotted, tensor) for dotted, tensor in named if not tensor.is_meta]
    model.notes += build_as_rank_0(named, name=model.name, world=world)
    for parameter in module.parameters():
        if not parameter.is_meta and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _cutter(model: FsdpModel, world: World) -> Callable[..., None]:
    """Return what gives modules to ``fully_shard`` as one unit."""
    spec = model.spec
    mesh = mesh_of(spec, world)
    offload, notes = cpu_offload.policy(spec, world)
    model.notes += notes

    def cut(unit: Any, ignored: set[nn.Parameter], *, is_root: bool) -> None:
        fully_shard(
            unit,
            mesh=mesh,
            # the root is gathered for the whole forward; to free it before backward gains nothing
            reshard_after_forward=not is_root and spec.strategy != "shard_grad_op",
            ignored_params=ignored,
            mp_policy=precision.fsdp_policy(spec, is_root=is_root),
            offload_policy=offload,
        )

    return cut


def _replaced(
    model: FsdpModel, places: list[tuple[nn.Parameter, nn.Module, str]]
) -> dict[int, nn.Parameter]:
    """Return each new parameter by the id of the one it replaces, and note what was replaced."""
    found = {}
    for old, owner, attribute in places:
        new = owner._parameters[attribute]
        if new is None:
            continue
        found[id(old)] = new
        if new is not old:
            vars(new).update(vars(old))  # a person's marks on it, such as p.no_decay
            model.earlier.append((weakref.ref(old), weakref.ref(new)))
    return found


def _prepare(model: FsdpModel) -> None:
    """Let a sharded model behave as the person's own.

    Collective: every rank must call this.
    """
    for name, unit in torch_private.units(model.module):
        torch_private.name_in_collectives(unit, f"{model.name}.{name}" if name else model.name)
        torch_private.count_missing_as_zero(unit, model.used)
        torch_private.reduce_what_came_late(unit)
        torch_private.gather_outside_inference(unit)
        torch_private.gather_for_written_views(unit)
    gather_around_calls(model.module)
    free_before_steps(model.module)
    torch_private.read_scalars_whole()
    torch_private.take_whole_in_lists()
    torch_private.step_on_own_parts()


def _parameter_placement(
    name: str, parameter: nn.Parameter, unit: str, mesh: DeviceMesh
) -> ParameterPlacement:
    shape = tuple(parameter.shape)
    sharded = isinstance(parameter, DTensor)
    size = mesh.size(-1)  # neighbouring ranks share a copy
    local_shapes = tuple(
        (shard_rows(rows=shape[0], world_size=size, rank=rank % size), *shape[1:])
        if sharded
        else shape
        for rank in range(mesh.size())
    )
    return ParameterPlacement(
        name=name,
        shape=shape,
        local_shapes=local_shapes,
        dtype=str(parameter.dtype).removeprefix("torch."),
        element_bytes=parameter.element_size(),
        kind="sharded" if sharded and (size > 1 or mesh.size() == 1) else "replicated",
        unit=unit,
    )


def _places(module: nn.Module) -> list[tuple[nn.Parameter, nn.Module, str]]:
    """Return every parameter with where it stands, tied ones once for each place."""
    return [
        (parameter, owner, attribute)
        for owner in module.modules()
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _set_divide_factor(model: FsdpModel, factor: float | None) -> None:
    torch_private.set_divide_factor(model.module, factor)
