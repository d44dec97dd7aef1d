"""ENGINE: what a run trains: the bound optimizers, their parameters, and what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import lbfgs
from fsdp_magic.engine.eval_mode import has_modes
from fsdp_magic.engine.optimizers import parameters_of, refuse_shared, refuse_unfit, repoint
from fsdp_magic.engine.parallel.rank_zero import take_from_rank_0
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.used import Used
from fsdp_magic.engine.world import World


@dataclass(slots=True, kw_only=True)
class Trained:
    """What a run trains.

    Attributes:
        optimizers: by name; every one of them steps.
        parameters: every parameter in them, once.
        whole: those of them that each rank holds whole and no model reduces.
        used: which of them a step used.
    """

    optimizers: dict[str, Optimizer]
    parameters: list[torch.Tensor]
    whole: list[torch.Tensor]
    used: Used


def find_trained(
    namespace: Mapping[str, Any], models: list[ShardedModel], *, manual: bool = False
) -> tuple[Trained, list[str]]:
    """Return what the bound optimizers train, and sentences about what looks wrong.

    What no optimizer trains is set to free its parameters after every forward.

    Args:
        namespace: the person's variables.
        models: all sharded models that are alive.
        manual: whether the cell steps the optimizers itself.

    Raises:
        FsdpError: if there is nothing to train.
    """
    optimizers = reachable(namespace, Optimizer)
    if not optimizers:
        raise FsdpError(
            "no optimizer is bound on the engines; make one in %%fsdp_model: "
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    for optimizer in optimizers.values():
        for model in models:  # one made between a forward and now holds gathered parameters
            repoint(optimizer, model.in_place_of_gathered())
            repoint(optimizer, model.replaced)  # made of a list from before it was sharded
    refuse_shared(optimizers)
    refuse_unfit(optimizers, calls_closures=manual)
    for optimizer in optimizers.values():
        if isinstance(optimizer, LBFGS):
            lbfgs.work_on_shards(optimizer)
    parameters = [p for optimizer in optimizers.values() for p in parameters_of(optimizer)]
    _refuse_foreign(optimizers, models)
    held = {id(parameter) for parameter in parameters}
    for model in models:
        model.settle(held)
    reduced = set().union(*(model.reduced_here() for model in models))
    whole = [p for p in parameters if not isinstance(p, DTensor) and id(p) not in reduced]
    trained = Trained(
        optimizers=optimizers, parameters=parameters, whole=whole, used=Used(parameters, models)
    )
    return trained, [
        *_unoptimized(models, parameters),
        *_unbound(namespace, optimizers, models),
        *_stale(namespace, models),
    ]


def take_whole_from_rank_0(trained: Trained, world: World) -> list[str]:
    """Give every rank rank 0's values of the parameters that are kept whole.

    Collective: every rank must call this, when a run starts.

    Returns:
        A sentence, if they differed.
    """
    named = [(f"parameter {number}", p) for number, p in enumerate(trained.whole)]
    if not take_from_rank_0(named, built="the parameters of no module", world=world):
        return []
    return ["parameters that are not sharded differed between ranks; all have rank 0's now"]


def _refuse_foreign(optimizers: Mapping[str, Optimizer], models: list[ShardedModel]) -> None:
    """Raise if an optimizer trains shards that are not ours: their gradients would be averaged."""
    ours = {id(p) for model in models for p in model.named_parameters().values()}
    for name, optimizer in optimizers.items():
        if any(isinstance(p, DTensor) and id(p) not in ours for p in parameters_of(optimizer)):
            raise FsdpError(
                f"{name} holds sharded parameters of a model that is gone, or that %%fsdp_model "
                "did not shard; build the model and its optimizer again in a %%fsdp_model cell, "
                f"or: del {name}"
            )


def _unbound(
    namespace: Mapping[str, Any], optimizers: Mapping[str, Optimizer], models: list[ShardedModel]
) -> list[str]:
    """Name optimizers of parameters that no name leads to: those of a part that was replaced."""
    modules = reachable(namespace, nn.Module).values()
    bound = {id(p) for module in modules for p in module.parameters()}
    present = {id(module) for module in modules}
    named = (m.named_parameters() for m in models if id(m.module) in present)
    bound |= {id(parameter) for each in named for parameter in each.values()}
    holders = (Optimizer, LRScheduler)
    names = [n for n, v in namespace.items() if n[0] != "_" and not isinstance(v, holders)]
    bound |= {id(tensor) for tensor in reachable(namespace, torch.Tensor, names=names).values()}
    counts = {
        name: sum(id(p) not in bound for p in parameters_of(optimizer))
        for name, optimizer in optimizers.items()
    }
    return [
        f"{name} holds {count} parameters that no model and no variable has; if a part of a model "
        "was replaced, make the optimizer again"
        for name, count in counts.items()
        if count
    ]


def _stale(namespace: Mapping[str, Any], models: list[ShardedModel]) -> list[str]:
    """Name what leads to parameters as they were before sharding, which nothing trains."""
    earlier = {key for model in models for key in model.replaced}
    if not earlier:
        return []
    names = [n for n, p in reachable(namespace, nn.Parameter).items() if id(p) in earlier]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"{names[0]}{more} is a parameter from before the model was sharded, which nothing trains; "
        "take it from the model again"
    ]


def _unoptimized(models: list[ShardedModel], parameters: list[torch.Tensor]) -> list[str]:
    held = {id(parameter) for parameter in parameters}
    missing = [
        f"{model.name}.{name}"
        for model in models
        for name, parameter in model.named_parameters().items()
        if parameter.requires_grad and id(parameter) not in held
    ]
    # a model no part of which is optimized is a teacher, not a mistake
    partly = [m for m in models if any(id(p) in held for p in m.named_parameters().values())]
    missing = [name for name in missing if any(name.startswith(f"{m.name}.") for m in partly)]
    if not missing:
        return []
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return [f"in no optimizer, so not trained: {', '.join(missing[:3])}{more}"]


def put_in_train_mode(models: list[ShardedModel], trained: Trained) -> list[str]:
    """Put models of which a part is trained into train mode, and say which were not.

    Optimizers that have a train mode too are put into it.
    """
    held = {id(parameter) for parameter in trained.parameters}
    changed = []
    for model in models:
        is_trained = any(id(p) in held for p in model.named_parameters().values())
        if is_trained and not model.module.training:
            model.module.train()
            changed.append(model.name)
    for optimizer in trained.optimizers.values():
        if has_modes(optimizer):
            switched: Any = optimizer
            switched.train()
    return [f"{name} was in eval mode and is in train mode now" for name in changed]
