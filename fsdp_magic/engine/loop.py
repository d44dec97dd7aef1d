"""ENGINE: the steps of a run, one after the other, and what follows each of them.

Before a step the ranks vote: all have a batch, none wants to stop, and what their batches count
together. After it come the person's function, schedulers and evaluation, in that order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from fsdp_magic.engine.data import Data, StepBatches
from fsdp_magic.engine.fsdp_in_cells import FsdpInCells
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.records import Records, StepResult
from fsdp_magic.engine.rollback import StepUndo
from fsdp_magic.engine.step import Step
from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.weights import Weighing, Weights
from fsdp_magic.engine.world import World

_UNCOUNTED = "batches have no common number of samples (dim 0 of their tensors); each counts one"


class Aftermath(Protocol):
    """What follows a step, on every rank."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Do what follows a step that is done."""

    def after_epoch(self, step: int) -> None:
        """Do what follows the last step of an epoch."""


class Snapshotting(Protocol):
    """What makes snapshots, on every rank."""

    def begin(self, step: int) -> None:
        """Make one before the first step."""

    def after_step(self, step: int, *, epoch: int) -> None:
        """Make one after a step and all that followed it, if it is time."""


@dataclass(slots=True, kw_only=True)
class StepLoop:
    """The steps of one run on one rank.

    Attributes:
        step: how one is taken.
        world: the ranks.
        data: where batches come from; None: the cell brings its own.
        weighing: what batches count.
        micro_steps: per step.
        handle: the ``fsdp`` of the cell, which may ask to stop.
        stopping: whether the person has asked this run to stop.
        aftermath: what follows a step.
        undo: puts back what a step that is not finished has changed.
        snapshots: what makes them; None: nobody asked for any.
        watch: called after each step and all that followed it; None: nobody looks.
        records: of the steps.
        stopped: whether the run ended at the person's wish.
        finished_by_cell: whether it ended because the cell called ``fsdp.stop()`` on some rank.
        micro_batch_size: samples of the first micro-batch.
        epoch: of the newest step.
        notes: sentences a person should read.
    """

    step: Step
    world: World
    data: Data | None
    weighing: Weighing
    micro_steps: int
    handle: FsdpInCells
    stopping: Callable[[], bool]
    aftermath: Aftermath
    undo: StepUndo
    snapshots: Snapshotting | None = None
    watch: Callable[[], None] | None = None
    records: Records = field(default_factory=Records)
    stopped: bool = False
    finished_by_cell: bool = False
    micro_batch_size: int | None = None
    epoch: int = 0
    notes: list[str] = field(default_factory=list)
    """Whether the person or the cell, on any rank, has asked for the run to end."""

    def run(self, *, first_step: int, total_steps: int | None) -> None:
        """Take steps until their number is reached, the data ends, or a rank wants to stop.

        Collective: every rank must call this.

        Args:
            first_step: ``step`` of the first one in the cell.
            total_steps: how many; None: to the end of the data.
        """
        turned_already = True
        if self.snapshots is not None:
            self.snapshots.begin(first_step)
        for step in itertools.count(first_step):
            # ranks whose data differs in length must still take the same number of steps
            over = total_steps is not None and step == first_step + total_steps
            with self.undo.unless_kept(), self._batches_come_again():
                batches = None if over else self._take()
                turned = not over and (batches is None or batches.epoch != self.epoch)
                turned = turned and not turned_already
                weights, turned = self._agree_to_start(batches, turned=turned)
                if turned:
                    self.aftermath.after_epoch(step - 1)
                if weights is None or batches is None:
                    self._note_early_end(step - first_step, total_steps)
                    return
                result = self._take_step(step, batches, weights)
            self.records.add(result)
            self.aftermath.after_step(step, result)
            turned_already = self.data is not None and bool(batches.ends_epoch)
            if turned_already:
                self.aftermath.after_epoch(step)
            if self.snapshots is not None:
                self.snapshots.after_step(step + 1, epoch=self.epoch)
            if self.watch is not None:
                self.watch()

    @contextmanager
    def _batches_come_again(self) -> Iterator[None]:
        """Put the data back to where the step began if it fails."""
        try:
            yield
        except BaseException:
            if self.data is not None:
                self.data.undo()
            raise

    def _take(self) -> StepBatches | None:
        if self.data is None:
            ones: list[int | None] = [1] * self.micro_steps
            return StepBatches(
                batches=[None] * self.micro_steps, counts=ones, labels=[None] * len(ones), epoch=0
            )
        with INTERRUPTS.allowed():
            return self.data.take()

    def _agree_to_start(
        self, batches: StepBatches | None, *, turned: bool
    ) -> tuple[Weights | None, bool]:
        """Return what each micro-batch counts, and whether a new epoch begins.

        The weights are None if not all ranks take the step. If any rank's batches have no number
        of samples, every micro-batch counts one.
        """
        flags = Flag.STOP if self.stopping() else Flag.NONE
        flags |= Flag.FINISH if self.handle.stopping else Flag.NONE
        flags |= Flag.NEW_EPOCH if turned else Flag.NONE
        counts: list[int | None] = []
        if batches is None:
            flags |= Flag.NO_BATCH
        else:
            counts = self.weighing.known(batches)
            flags |= Flag.UNCOUNTED if None in counts else Flag.NONE
        known = sum(count for count in counts if count is not None)
        agreed, total = self.world.vote.take(flags, count=0 if None in counts else known)
        turned = Flag.NEW_EPOCH in agreed
        self.stopped = Flag.STOP in agreed
        self.finished_by_cell = Flag.FINISH in agreed
        if Flag.STOP in agreed or Flag.FINISH in agreed or Flag.NO_BATCH in agreed:
            return None, turned and Flag.STOP not in agreed
        counted = Flag.UNCOUNTED not in agreed
        if not counted:
            if not self.weighing.late:
                self._note(_UNCOUNTED)
            total = self.micro_steps * self.world.world_size
        return self.weighing.agreed(counts, total, counted=counted), turned

    def _take_step(self, step: int, batches: StepBatches, weights: Weights) -> StepResult:
        self.epoch = batches.epoch
        if self.data is not None and self.micro_batch_size is None:
            self.micro_batch_size = batches.counts[0]
        result = self.step.take(step, batches, weights)
        if self.data is not None:
            self.data.commit()
        self.undo.keep()
        return result

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _note_early_end(self, steps: int, total_steps: int | None) -> None:
        """Say so if data ended before the steps that were asked for."""
        if total_steps is None or steps >= total_steps or self.stopped:
            return
        if self.finished_by_cell:
            self._note(f"fsdp.stop() ended the run after {steps:,} of {total_steps:,} steps")
        else:
            self._note(f"the data ended after {steps:,} of {total_steps:,} steps")


@contextmanager
def running(handle: FsdpInCells) -> Iterator[None]:
    """Let the cell's ``fsdp.stop()`` work inside."""
    handle.begin_run()
    try:
        yield
    finally:
        handle.end_run()
