"""ENGINE: what of a snapshot of lost engines has found its place, and optimizers that find it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.engine import hyperparameters
from fsdp_magic.engine.snapshot_content import Content, OptimizerContent, Subjects, kind_of
from fsdp_magic.engine.snapshot_unpacking import Unpacker


@dataclass(slots=True, kw_only=True)
class Awaited:
    """A snapshot of a lost engine, of which not everything found its place yet.

    Attributes:
        number: of the snapshot.
        models: those that were put back, by name.
        optimizers, schedulers: which were put back.
        unlike: optimizers of another class, whose state is left as it is.
        notes: sentences a person should read, until they are told.
    """

    number: int
    models: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    schedulers: weakref.WeakSet[LRScheduler] = field(default_factory=weakref.WeakSet)
    unlike: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    notes: list[str] = field(default_factory=list)

    def there(self, subjects: Subjects) -> list[nn.Module]:
        """Return the models that were put back and are still what their names stand for."""
        named = ((subjects.models.get(name), model()) for name, model in self.models.items())
        return [module for module, put_back in named if module is not None and module is put_back]

    def tell(self) -> tuple[str, ...]:
        """Return the notes that were not told yet."""
        notes, self.notes = tuple(self.notes), []
        return notes


def put_back_optimizer(
    unpacker: Unpacker,
    name: str,
    optimizer: Optimizer,
    kept: OptimizerContent,
    waiting: Awaited,
) -> None:
    """Put an optimizer back, whose parameters fit; the state of another class is none for it."""
    if kind_of(optimizer) == kept.kind:
        waiting.notes += hyperparameters.edited(name, optimizer, kept, unpacker)
        unpacker.optimizer(optimizer, kept)
        waiting.optimizers.add(optimizer)
        return
    unpacker.own_parameters(optimizer, kept)
    waiting.unlike.add(optimizer)
    before, now = kept.kind.rpartition(".")[2], type(optimizer).__name__
    waiting.notes.append(
        f"`{name}` is {now} now and was {before} in the snapshot: its state starts anew"
    )


def put_back_schedulers(
    unpacker: Unpacker, content: Content, subjects: Subjects, waiting: Awaited
) -> None:
    """Put schedulers back whose optimizers were, and the learning rates that making one set."""
    for name, scheduler in subjects.schedulers.items():
        kept = content.schedulers.get(name)
        if kept is None or kept.kind != kind_of(scheduler) or scheduler in waiting.schedulers:
            continue
        optimizer = getattr(scheduler, "optimizer", None)
        for own, each in subjects.optimizers.items():
            if each is optimizer and each in waiting.optimizers:
                scheduler.load_state_dict(unpacker.unpack(kept.state))
                unpacker.groups(each, content.optimizers[own])
                waiting.schedulers.add(scheduler)
