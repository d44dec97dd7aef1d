"""ENGINE: whether all ranks train the same: before the first step, and after each manual one.

Each rank puts in words what it trains, or has stepped. Their checksums are compared in two votes,
which cost microseconds; only where they differ are the words exchanged, to name the first
difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.trained import Trained
from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.world import World

_CHECKSUM = 0xFFFFFF


def refuse_unlike(trained: Trained, models: Sequence[ShardedModel], world: World) -> None:
    """Raise, naming the first difference, if ranks train different things.

    Collective: every rank must call this, when a run starts.
    """
    if difference := _compared(_words(trained, models), world):
        raise FsdpError(f"{difference}; every rank must train the same, so bind the same on all")


def refuse_unlike_steps(optimizers: Mapping[str, Optimizer], world: World) -> None:
    """Raise, naming the first difference, if ranks have stepped optimizers differently.

    Collective: every rank must call this, at the end of a manual step.
    """
    if difference := _compared(_words_of_steps(optimizers), world):
        raise FsdpError(
            f"{difference}, in this run; every rank must step the same optimizers equally often, "
            "so do not let a rank decide alone"
        )


def _compared(mine: Mapping[str, str], world: World) -> str:
    """Return the first difference between what ranks say; empty: there is none.

    Collective: every rank must call this.
    """
    checksum = zlib.crc32(repr(list(mine.items())).encode()) & _CHECKSUM
    _, total = world.vote.take(count=checksum)
    unlike = Flag.STOP if total != checksum * world.world_size else Flag.NONE
    agreed, _ = world.vote.take(unlike)  # not every rank need differ from the mean
    if not agreed:
        return ""
    said: list[Mapping[str, str]] = [{}] * world.world_size
    dist.all_gather_object(said, mine)
    return _difference(said)


def _difference(said: Sequence[Mapping[str, str]]) -> str:
    """Return the first difference between rank 0 and another; empty: there is none."""
    first = said[0]
    for rank, other in enumerate(said):
        for what in dict.fromkeys((*first, *other)):
            if first.get(what) != other.get(what):
                ours, theirs = first.get(what, "is missing"), other.get(what, "is missing")
                return f"{what} {ours} on rank 0 and {theirs} on rank {rank}"
        for ours, theirs in zip(first, other, strict=True):
            if ours != theirs:
                return f"{ours} comes first on rank 0 and {theirs} on rank {rank}"
    return ""


def _words(trained: Trained, models: Sequence[ShardedModel]) -> dict[str, str]:
    """Return what is trained, in the order that it is stepped in."""
    words: dict[str, str] = {}
    held_ids = {id(parameter) for parameter in trained.parameters}
    for model in models:
        named = model.named_parameters()
        if not any(id(p) in held_ids for p in named.values()):
            continue  # one that nothing leads to any more lives until it is collected
        words[f"the model `{model.name}`"] = "is trained"
        words |= {f"`{model.name}.{name}`": _form(p) for name, p in named.items()}
    for name, optimizer in trained.optimizers.items():
        held = parameters_of(optimizer)
        words[f"the optimizer `{name}`"] = f"holds {len(held)} parameters"
        for number, parameter in enumerate(held):
            words[f"parameter {number} of `{name}`"] = _form(parameter)
    return words


def _words_of_steps(optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    words = {}
    for name, optimizer in optimizers.items():
        count = STEPS.count_of(optimizer)
        torn = ", the last not to its end," if count.begun > count.completed else ""
        steps = "1 step" if count.begun == 1 else f"{count.begun} steps"
        words[f"the optimizer `{name}`"] = f"has taken {steps}{torn}"
    return words


def _form(parameter: torch.Tensor) -> str:
    kind = str(parameter.dtype).removeprefix("torch.")
    trained = "trained" if parameter.requires_grad else "frozen"
    return f"is {trained} {kind} of shape {tuple(parameter.shape)}"
