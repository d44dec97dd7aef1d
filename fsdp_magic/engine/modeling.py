"""ENGINE: which modules a person means, and sharding them together with their optimizers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.optimizers import parameters_of, repoint
from fsdp_magic.engine.parallel import blocks
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.strategies import spread
from fsdp_magic.engine.parallel.unfit import refuse_shared_between
from fsdp_magic.engine.parallel.whole_models import is_whole
from fsdp_magic.engine.reachable import outermost, reachable
from fsdp_magic.engine.world import World

Models = dict[str, ShardedModel]


def wanted_modules(
    namespace: Mapping[str, Any],
    spec: ModelSpec,
    *,
    assigned: Iterable[str],
    models: Models,
) -> tuple[dict[str, nn.Module], list[ShardedModel]]:
    """Return the modules to shard by name, and the models that are left alone.

    Args:
        namespace: the person's variables.
        spec: names what to shard, or nothing.
        assigned: the names that the cell bound, which count if nothing is named.
        models: what we have sharded.

    Raises:
        FsdpError: if there is no module with parameters, or one was sharded by other code.
    """
    found = (
        _called({name: _named_module(name, namespace) for name in spec.names})
        if spec.names
        else outermost(_modules(namespace, sorted(assigned)))
    )
    if not found:
        raise FsdpError(
            "the cell binds no module with parameters; end it with a line such as: "
            "model = GPT2LMHeadModel(config), or name one: %%fsdp_model NAME"
        )
    _refuse_replicas(found)
    wanted = {name: module for name, module in found.items() if not _is_sharded(module)}
    ours = {id(model.module): model for model in models.values() if model.alive}
    foreign = [n for n, module in found.items() if n not in wanted and id(module) not in ours]
    if foreign:
        inner = next((m for m in found[foreign[0]].modules() if id(m) in ours), None)
        if inner is not None:
            raise FsdpError(
                f"{foreign[0]} holds {ours[id(inner)].name}, which is sharded already; build the "
                "whole of it in one %%fsdp_model cell"
            )
        raise FsdpError(
            f"{foreign[0]} was sharded by other code than ours; build it without fully_shard, and "
            "%%fsdp_model shards it"
        )
    return wanted, [ours[id(module)] for name, module in found.items() if name not in wanted]


def shard_all(
    wanted: Mapping[str, nn.Module],
    spec: ModelSpec,
    namespace: Mapping[str, Any],
    *,
    models: Models,
    world: World,
) -> tuple[Placement, ...]:
    """Shard modules, remember them in ``models``, and re-point every bound optimizer.

    Collective: every rank must call this.
    """
    placements = []
    refuse_shared_between(wanted)
    for name, module in wanted.items():
        model, replaced = spread(module, name=name, spec=spec, world=world)
        for optimizer in reachable(namespace, Optimizer).values():
            repoint(optimizer, replaced)
        _remember(model, models)
        placements.append(model.placement())
    return tuple(placements)


def shard_forgotten(namespace: Mapping[str, Any], *, models: Models, world: World) -> list[str]:
    """Shard modules that an optimizer trains and that never were, and say so.

    Collective: every rank must call this.
    """
    trained = {
        id(parameter)
        for optimizer in reachable(namespace, Optimizer).values()
        for parameter in parameters_of(optimizer)
    }
    found = outermost(_modules(namespace, None))
    forgotten = {
        name: module
        for name, module in found.items()
        if not _is_sharded(module) and any(id(p) in trained for p in module.parameters())
    }
    _refuse_replicas(forgotten)
    spec = world.request.defaults
    shard_all(forgotten, spec, namespace, models=models, world=world)
    return [f"{name} had not been sharded; it is now ({spec.strategy})" for name in forgotten]


def bound_names(models: Models, namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of models that still lead to them.

    A model that was replaced lives on as long as a person's variable (a cell's ``logits``, say)
    holds its graph; it is not shown.
    """
    return tuple(
        model.name
        for model in models.values()
        if model.alive and leads_to(model.name, namespace) is model.module
    )


def leads_to(name: str, namespace: Mapping[str, Any]) -> Any:
    """Return what a model's name stands for; None if that is nothing.

    The name of one that was replaced, ``model (1)``, is no expression: it would call the other.
    """
    if "(" in name:
        return None
    try:
        return eval(name, dict(namespace))
    except Exception:  # a person's own attribute may raise anything
        return None


def _named_module(name: str, namespace: Mapping[str, Any]) -> nn.Module:
    try:
        module = eval(name, dict(namespace))
    except (NameError, AttributeError, LookupError, SyntaxError) as error:
        raise FsdpError(f"{name} is not there on the engines ({error})") from None
    if not isinstance(module, nn.Module):
        raise FsdpError(f"{name} is a {type(module).__name__}, not a torch module")
    if next(module.parameters(), None) is None:
        raise FsdpError(f"{name} has no parameters, so there is nothing to shard")
    return module


def _modules(namespace: Mapping[str, Any], names: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return the modules with parameters that names lead to."""
    found = _called(reachable(namespace, nn.Module, names=names))
    return {n: m for n, m in found.items() if next(m.parameters(), None) is not None}


def _refuse_replicas(modules: Mapping[str, nn.Module]) -> None:
    """Raise if a module holds a wrapper that copies its own module over devices."""
    for name, module in modules.items():
        for path, part in module.named_modules():
            if isinstance(part, (nn.DataParallel, DistributedDataParallel)):
                where = f"{name}.{path}" if path else name
                raise FsdpError(
                    f"{where} is a {type(part).__name__}, which spreads its module by itself; "
                    f"bind the module in it: {where} = {where}.module"
                )


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(child, FSDPModule) or is_whole(child) for child in module.modules())


def _remember(model: ShardedModel, models: Models) -> None:
    """Add a model; those that are gone are forgotten, one that lost its name gets another."""
    gc.collect()  # modules hold themselves in cycles
    for name in [name for name, other in models.items() if not other.alive]:
        del models[name]
    earlier = models.pop(model.name, None)
    if earlier is not None:
        name = next(
            f"{model.name} ({n})" for n in itertools.count(1) if f"{model.name} ({n})" not in models
        )
        earlier.name = name
        models[name] = earlier
    models[model.name] = model


def _called(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return modules with those in the place of a container that are called by themselves."""
    called: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if isinstance(module, blocks.WITHOUT_FORWARD):
            quote = isinstance(module, nn.ModuleDict)
            parts = {
                f"{name}[{key!r}]" if quote else f"{name}[{key}]": child
                for key, child in module.named_children()
            }
            called |= _called(parts)
        else:
            called[name] = module
    return called
