"""ENGINE: going back to a snapshot.

In a session that lives on, after a torn step, everything is put back into the objects that it was
of. On engines that replaced lost ones the models are built anew by the same cells, and are given
what those had; what is not there yet (an optimizer that a later cell makes, data) waits for the
next run. All ranks load or none.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_magic.core.recovery import RestoreReport
from fsdp_magic.engine import randomness
from fsdp_magic.engine.awaited import Awaited, put_back_optimizer, put_back_schedulers
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.snapshot_content import Content, Subjects, kind_of
from fsdp_magic.engine.snapshot_unpacking import Unpacker
from fsdp_magic.engine.snapshots import Keeper, Snapshots
from fsdp_magic.engine.world import World


class Restoration:
    """Puts back what snapshots hold.

    Args:
        snapshots: of this rank.
        world: this rank's.
        keeper: where it is put back.
    """

    def __init__(self, snapshots: Snapshots, world: World, keeper: Keeper) -> None:
        self._snapshots = snapshots
        self._world = world
        self._keeper = keeper
        self._waiting: Awaited | None = None

    @property
    def waits(self) -> bool:
        """Whether the next run puts back what the models that were built do not hold."""
        return self._waiting is not None

    def forget(self) -> None:
        """Wait for nothing any more: another model is built."""
        self._waiting = None

    def restore(self) -> RestoreReport:
        """Put everything back to the newest snapshot, in the objects that it was made of.

        Collective: every rank must call this, between cells.
        """
        subjects = self._snapshots.subjects()
        if not self._snapshots.agree():
            return RestoreReport(step=None)
        assert self._snapshots.file is not None
        with self._snapshots.file.reading() as (content, reader):
            unpacker = Unpacker(reader, self._world.device)
            differing = self._first_of_all(_differences(unpacker, content, subjects))
            if differing:
                note = f"the snapshot of step {content.step:,} does not fit: {differing}"
                return RestoreReport(step=None, notes=(note,))
            self._put_back(unpacker, content, subjects)
            self._count_from(unpacker, content)
            randomness.restore(unpacker.unpack(content.process))
        self._waiting = None
        if self._snapshots.mark is not None:
            self._keeper.position.back(self._snapshots.mark)
        else:  # made before models were built anew, on some rank by an engine that is gone
            self._keeper.position.expect(content.places)
        return _report(content)

    def restore_models(self, names: Container[str]) -> RestoreReport:
        """Put what a lost engine had into models that were built anew, and wait for the rest.

        A model that is built once more is meant to begin at step 0: the snapshot is forgotten.

        Collective: every rank must call this.

        Args:
            names: of the models that were built.
        """
        if not self._snapshots.agree():
            self.forget()
            return RestoreReport(step=None)
        if self._waiting is None or self._waiting.number != self._snapshots.newest:
            self._waiting = Awaited(number=self._snapshots.newest)
        report = self._restore_models(names, self._waiting)
        if report.step is None and not report.waits:
            self.forget()
            self._snapshots.forget()
        return report

    def _restore_models(self, names: Container[str], waiting: Awaited) -> RestoreReport:
        assert self._snapshots.file is not None
        with self._snapshots.file.reading() as (content, reader):
            unpacker = Unpacker(reader, self._world.device)
            built = {n: m for n, m in self._snapshots.subjects().models.items() if n in names}
            differing = self._first_of_all(_differences_of_built(unpacker, content, built))
            if differing:
                for name in built:
                    waiting.models.pop(name, None)
                note = f"the snapshot of step {content.step:,} was not loaded: {differing}"
                return RestoreReport(step=None, waits=True, notes=(note,))
            if waiting.models.keys() & built.keys():
                note = f"the next step is 0; the snapshot of step {content.step:,} is forgotten"
                return RestoreReport(step=None, notes=(note,))
            for name, module in built.items():
                unpacker.module(module, content.models[name])
                waiting.models[name] = weakref.ref(module)
            self._put_back_rest(unpacker, content, waiting)
            self._count_from(unpacker, content)
            self._keeper.position.expect(content.places)
        return _report(content, notes=(*_sequential(content), *waiting.tell()))

    def complete(self) -> list[str]:
        """Put back what was not there when the models were built; a run begins.

        Returns:
            Sentences about what did not find its place.
        """
        self._snapshots.show_shards()
        waiting, file, self._waiting = self._waiting, self._snapshots.file, None
        if waiting is None or file is None or waiting.number != self._snapshots.newest:
            return []
        subjects = self._snapshots.subjects()
        there = waiting.there(subjects)
        if not there:  # what was built since is unlike it
            return []
        with file.reading() as (content, reader):
            unpacker = Unpacker(reader, self._world.device)
            self._put_back_rest(unpacker, content, waiting)
            self._keeper.randomness.outside = unpacker.unpack(content.process)
        missing = [n for n in content.models if subjects.models.get(n) not in there]
        told = {*waiting.optimizers, *waiting.unlike}
        put_back = {n for n, each in subjects.optimizers.items() if each in told}
        missing += [name for name in content.optimizers if name not in put_back]
        notes = list(waiting.tell())
        if missing:
            which = ", ".join(missing)
            notes.append(f"not put back from the snapshot: {which}; made anew or unlike it")
        return notes

    def _put_back(self, unpacker: Unpacker, content: Content, subjects: Subjects) -> None:
        """Put everything back into the objects that are there."""
        for name, kept in content.models.items():
            unpacker.module(subjects.models[name], kept)
        for name, kept in content.modules.items():
            if name in subjects.modules:
                unpacker.module(subjects.modules[name], kept)
        for name, optimizer in content.optimizers.items():
            unpacker.optimizer(subjects.optimizers[name], optimizer)
        for name, state in content.schedulers.items():
            if name in subjects.schedulers:
                subjects.schedulers[name].load_state_dict(unpacker.unpack(state.state))

    def _count_from(self, unpacker: Unpacker, content: Content) -> None:
        """Have the next run go on from there."""
        self._keeper.steps, self._keeper.epoch = content.step, content.epoch
        self._keeper.scaler.load_state_dict(content.scaler)
        self._keeper.randomness.state = unpacker.unpack(content.training)

    def _put_back_rest(self, unpacker: Unpacker, content: Content, waiting: Awaited) -> None:
        """Put back what stands beside the models and belongs to those that were put back."""
        subjects = self._snapshots.subjects()
        for name, module in subjects.modules.items():
            if name in content.modules:
                unpacker.module(module, content.modules[name])
        there = waiting.there(subjects)
        models = [model for model in self._keeper.models.values() if model.alive]
        spread = {id(p): m for m in models for p in m.named_parameters().values()}
        for name, optimizer in subjects.optimizers.items():
            kept = content.optimizers.get(name)
            if kept is None or optimizer in waiting.optimizers or optimizer in waiting.unlike:
                continue
            held = [
                p for p in parameters_of(optimizer) if isinstance(p, DTensor) or id(p) in spread
            ]
            trained = [spread[id(p)].module for p in held if id(p) in spread]
            is_there = len(trained) == len(held) and all(m in there for m in trained)
            if is_there and unpacker.is_like(optimizer, kept):
                put_back_optimizer(unpacker, name, optimizer, kept, waiting)
        put_back_schedulers(unpacker, content, subjects, waiting)

    def _first_of_all(self, differences: list[str]) -> str:
        """Return the first difference that any rank found; nothing: there is none anywhere.

        Collective: every rank must call this.
        """
        everybody: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(everybody, next(filter(None, differences), ""))
        return next(filter(None, everybody), "")


def _report(content: Content, *, notes: tuple[str, ...] = ()) -> RestoreReport:
    return RestoreReport(
        step=content.step,
        run_id=content.run_id,
        epochs_ended=content.epochs_ended,
        notes=notes,
    )


def _sequential(content: Content) -> tuple[str, ...]:
    """Say which data is read again from the beginning of its epoch to where it was."""
    names = [name for name in content.sequential if content.places[name].consumed]
    return tuple(
        f"{name} is read in its own order: the next run reads what was taken of it before the "
        "snapshot again and passes over it, which is exact if it yields the same again"
        for name in names
    )


def _differences(unpacker: Unpacker, content: Content, subjects: Subjects) -> list[str]:
    """Return in what the objects of a snapshot are no longer those that are there."""
    differences = [
        unpacker.difference(name, subjects.models[name], kept)
        if name in subjects.models
        else f"{name} is gone"
        for name, kept in content.models.items()
    ]
    optimizers = subjects.optimizers
    return differences + [
        f"{name} is another one now"
        for name, kept in content.optimizers.items()
        if name not in optimizers
        or kind_of(optimizers[name]) != kept.kind
        or not unpacker.is_like(optimizers[name], kept)
    ]


def _differences_of_built(
    unpacker: Unpacker, content: Content, built: Mapping[str, nn.Module]
) -> list[str]:
    """Return in what models that were built are unlike those of a snapshot."""
    return [
        unpacker.difference(name, module, content.models[name])
        if name in content.models
        else f"it holds no {name}, but {', '.join(content.models) or 'no model'}"
        for name, module in built.items()
    ]
