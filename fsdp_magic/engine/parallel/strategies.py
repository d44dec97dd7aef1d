"""ENGINE: spreading a model over the ranks by the strategy that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import (
    activation_checkpointing,
    compiling,
    ddp,
    forwards,
    fsdp,
    precision,
    sync_batchnorm,
    zero1,
)
from fsdp_magic.engine.parallel.meta import InitialWeights
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.unspread import Changes, Shape
from fsdp_magic.engine.parallel.wrapping import left_notes, size_notes, wrap
from fsdp_magic.engine.world import World

Replaced = dict[int, nn.Parameter]
"""What an optimizer must hold, by the id of the parameter that it replaces."""
_STRATEGIES: Mapping[str, Callable[..., tuple[ShardedModel, Replaced]]] = {
    "full_shard": fsdp.shard,
    "shard_grad_op": fsdp.shard,
    "hybrid_shard": fsdp.shard,
    "zero1": zero1.replicate_with_sharded_state,
    "ddp": ddp.replicate,
}
_CUT_BY_UNIT = ("full_shard", "shard_grad_op", "hybrid_shard")
"""Strategies that give a model built with ``--meta`` its memory unit by unit."""


def spread(
    module: nn.Module, *, name: str, spec: ModelSpec, world: World
) -> tuple[ShardedModel, Replaced]:
    """Spread a model over the ranks, in place.

    Collective: every rank must call this.

    Args:
        module: the model; the same on every rank, or rank 0's is taken.
        name: what it is bound to.
        spec: how.
        world: over whom.

    Returns:
        The spread model, and each new parameter by the id of the one it replaces.
    """
    if spec.strategy not in _STRATEGIES:
        raise FsdpError(f"--strategy {spec.strategy} is not built yet")
    precision.refuse_unfit(spec, world)
    compiling.refuse_unfit(spec)
    forwards.bare(module)  # of what an attempt left that was refused
    before = Shape(module.modules())
    try:
        model, replaced = _spread(module, name=name, spec=spec, world=world)
    except BaseException:
        before.put_back()
        raise
    Changes(before, module)
    return model, replaced


def _spread(
    module: nn.Module, *, name: str, spec: ModelSpec, world: World
) -> tuple[ShardedModel, Replaced]:
    before = list(module.parameters())  # while they live, no other gets their ids
    given: Replaced = {}
    if spec.strategy not in _CUT_BY_UNIT:  # the others are whole on every rank anyway
        initial = InitialWeights(module, name=name, world=world)
        initial.give(module)
        given = initial.given
        initial.check()
    notes = sync_batchnorm.apply(module, spec, world)
    wrapping = wrap(module, spec.wrap)
    if spec.strategy in _CUT_BY_UNIT:
        notes += size_notes(name, module, spec.wrap)
    notes += [
        *left_notes(name, wrapping),
        *activation_checkpointing.apply(module, wrapping.units, spec),
        *compiling.apply(module, wrapping.units, spec),
        *precision.cast_inputs(module, spec),
    ]
    model, replaced = _STRATEGIES[spec.strategy](
        module, name=name, spec=spec, world=world, units=wrapping.units
    )
    model.notes += notes
    del before
    return model, replaced | {old: replaced.get(id(new), new) for old, new in given.items()}
