"""ENGINE: fully sharded data parallelism with FSDP2: ``full_shard`` and ``shard_grad_op``.

A unit is what is gathered at once: each repeated block of the model is one, and what is left is
the root's. ``full_shard`` frees a unit's parameters after its forward and gathers them again for
backward (ZeRO-3); ``shard_grad_op`` keeps them in between (ZeRO-2). Gradients are added up over
the ranks, not averaged, while our loop trains: each rank weighs its loss by its part of the
global batch, so their sum is the gradient of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.placement import ParameterPlacement, Placement, shard_rows
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.blocks import blocks, chosen_parts
from fsdp_magic.engine.parallel.methods import free_before_steps, gather_around_calls
from fsdp_magic.engine.parallel.rank_zero import take_from_rank_0
from fsdp_magic.engine.parallel.unfit import refuse_lossy
from fsdp_magic.engine.world import World


@dataclass(slots=True, kw_only=True)
class ShardedModel:
    """A model that was spread over the ranks; the module stays the person's object.

    It is held weakly, so that a model that nothing leads to any more is freed.

    Attributes:
        name: what it was bound to.
        reference: to the root.
        strategy: how it is spread.
        notes: sentences a person should read.
        used: ids of the sharded parameters that got a gradient on this rank since it was cleared.
        earlier: the parameters from before, as long as a person holds them, with what replaced
            each.
    """

    name: str
    reference: weakref.ref[nn.Module]
    strategy: str
    notes: list[str] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    earlier: list[tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = field(
        default_factory=list, repr=False
    )

    @property
    def replaced(self) -> dict[int, nn.Parameter]:
        """The present parameter by the id of an earlier one that a person still holds."""
        pairs = ((old(), new()) for old, new in self.earlier)
        return {id(old): new for old, new in pairs if old is not None and new is not None}

    @property
    def alive(self) -> bool:
        """Whether the model is still there."""
        return self.reference() is not None

    @property
    def module(self) -> nn.Module:
        """The root, of a model that is alive."""
        module = self.reference()
        assert module is not None
        return module


def shard(
    module: nn.Module, *, name: str, spec: ModelSpec, world: World
) -> tuple[ShardedModel, dict[int, nn.Parameter]]:
    """Spread a model over the ranks, in place.

    Collective: every rank must call this.

    Args:
        module: the model; the same on every rank, or rank 0's is taken.
        name: what it is bound to.
        spec: how.
        world: over whom.

    Returns:
        The sharded model, and each new parameter by the id of the one it replaces.
    """
    model = ShardedModel(name=name, reference=weakref.ref(module), strategy=spec.strategy)
    places = _places(module)
    _refuse_meta(module, name)
    refuse_lossy(module, name)
    module.to(world.device)
    named = [*module.named_parameters(), *module.named_buffers()]
    if take_from_rank_0(named, built=name, world=world):
        model.notes.append(f"the ranks had built {name} differently; all have rank 0's weights now")
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    # FSDP2 cannot cut a scalar, nor what has no rows
    ignored = {p for p in module.parameters() if p.ndim == 0 or p.numel() == 0}
    _refuse_mixed_dtypes(module, ignored)
    model.notes += _chosen_notes(name, module)
    for unit in blocks(module):
        fully_shard(
            unit,
            mesh=world.mesh,
            reshard_after_forward=spec.strategy == "full_shard",
            ignored_params=ignored,
        )
    # the root is gathered for the whole forward; freeing it just before backward gains nothing
    fully_shard(module, mesh=world.mesh, reshard_after_forward=False, ignored_params=ignored)
    torch_private.settle_root(module)
    _prepare(model)
    for old, owner, attribute in places:
        new = owner._parameters[attribute]
        if new is not None and new is not old:
            vars(new).update(vars(old))  # a person's marks on it, such as p.no_decay
            model.earlier.append((weakref.ref(old), weakref.ref(new)))
    return model, {
        id(old): new
        for old, owner, attribute in places
        if (new := owner._parameters[attribute]) is not None
    }


def _prepare(model: ShardedModel) -> None:
    """Let a sharded model behave as the person's own.

    Collective: every rank must call this.
    """
    for name, unit in torch_private.units(model.module):
        torch_private.name_in_collectives(unit, f"{model.name}.{name}" if name else model.name)
        torch_private.count_missing_as_zero(unit, model.used)
        torch_private.reduce_what_came_late(unit)
        unit.unshard()  # what is gathered first in inference mode could never train
        unit.reshard()
    gather_around_calls(model.module)
    free_before_steps(model.module)
    torch_private.read_scalars_whole()


@contextmanager
def gradients_added_up(models: list[ShardedModel], world: World) -> Iterator[None]:
    """Add gradients up over the ranks inside, where FSDP2 would average them."""
    try:
        _set_divide_factor(models, 1.0)
        yield
    finally:
        _set_divide_factor(models, float(world.world_size))


def reshard(model: ShardedModel) -> None:
    """Free gathered parameters, so that the next forward and any optimizer see the shards."""
    for _, unit in torch_private.units(model.module):
        unit.reshard()


def placement(model: ShardedModel, world: World) -> Placement:
    """Return where every parameter lives; the same on every rank, without communication."""
    unit_of = {
        id(parameter.sharded_param): name
        for name, unit in torch_private.units(model.module)
        for group in torch_private.parameter_groups(unit)
        for parameter in group.fsdp_params
    }
    return Placement(
        model=model.name,
        strategy=model.strategy,
        world_size=world.world_size,
        parameters=tuple(
            _parameter_placement(name, parameter, unit_of.get(id(parameter), ""), world)
            for name, parameter in model.module.named_parameters()
        ),
        notes=tuple(model.notes),
    )


def _parameter_placement(
    name: str, parameter: nn.Parameter, unit: str, world: World
) -> ParameterPlacement:
    shape = tuple(parameter.shape)
    sharded = isinstance(parameter, DTensor)
    local_shapes = tuple(
        (shard_rows(rows=shape[0], world_size=world.world_size, rank=rank), *shape[1:])
        if sharded
        else shape
        for rank in range(world.world_size)
    )
    return ParameterPlacement(
        name=name,
        shape=shape,
        local_shapes=local_shapes,
        dtype=str(parameter.dtype).removeprefix("torch."),
        element_bytes=parameter.element_size(),
        kind="sharded" if sharded else "replicated",
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


def _chosen_notes(name: str, module: nn.Module) -> list[str]:
    chosen = [f"{name}.{part}" for part in chosen_parts(module)]
    if not chosen:
        return []
    return [
        f"{', '.join(chosen)}: forward may call these on some ranks only, so they are gathered "
        "together with what holds them, not one by one"
    ]


def _refuse_meta(module: nn.Module, name: str) -> None:
    empty = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if empty:
        raise FsdpError(
            f"{name} is on the meta device, without weights (first: {empty[0]}); build it on the "
            "CPU"
        )


def _refuse_mixed_dtypes(module: nn.Module, whole: set[nn.Parameter]) -> None:
    """Raise, naming all, if trainable parameters of one unit differ in dtype."""
    kept = {id(parameter) for parameter in whole}
    unit_of = {
        id(p): number for number, unit in enumerate(blocks(module)) for p in unit.parameters()
    }
    units: dict[int | None, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in kept:
            units.setdefault(unit_of.get(id(parameter)), []).append((name, parameter))
    for trained in units.values():
        dtypes = {p.dtype for _, p in trained}
        if len(dtypes) > 1:
            listed = ", ".join(f"{n} ({str(p.dtype).removeprefix('torch.')})" for n, p in trained)
            raise FsdpError(
                f"trainable parameters of one unit must have one dtype; these differ: {listed}; "
                "make them one with .to(dtype) before they are sharded"
            )


def _set_divide_factor(models: list[ShardedModel], factor: float) -> None:
    for model in models:
        for _, unit in torch_private.units(model.module):
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(factor)
            # a sum and a division; gloo knows no premultiplied sum
            unit.set_force_sum_reduction_for_comms(True)
