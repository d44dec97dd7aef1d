"""ENGINE: the snapshots of a rank, made while a run goes on; ``restoration.py`` goes back to them.

Two files, written in turn, so that a whole one is always there. A snapshot has a number, the same
on all ranks, and counts once all have written it: they vote. After an engine was lost the newest
number that all ranks have is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.units import KIB, bytes_text
from fsdp_magic.engine import randomness
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.position import Mark, Position
from fsdp_magic.engine.randomness import TrainingRandomness
from fsdp_magic.engine.snapshot_content import Content, Packer, Subjects, subjects_of
from fsdp_magic.engine.snapshot_files import SnapshotFile
from fsdp_magic.engine.track import Track
from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.world import World


class Keeper(Protocol):
    """What an engine keeps between cells, which a snapshot holds and puts back."""

    namespace: dict[str, Any]
    models: dict[str, ShardedModel]
    position: Position
    steps: int
    epoch: int

    @property
    def scaler(self) -> GradScaler:
        """The fp16 scaler."""

    @property
    def randomness(self) -> TrainingRandomness:
        """The random state of training cells."""


class Snapshots:
    """The snapshots of this rank.

    Args:
        world: this rank's, which says where they are.
        keeper: what they are of.

    Attributes:
        file: the one that holds the newest; None: there is none.
    """

    def __init__(self, world: World, keeper: Keeper) -> None:
        self._world = world
        self._keeper = keeper
        self._files = [SnapshotFile(path) for path in world.request.snapshots]
        self._newest: int | None = None
        """Number of the newest that all ranks have; None: not known yet."""
        self.file: SnapshotFile | None = None
        self._marks: dict[int, Mark] = {}

    @property
    def newest(self) -> int:
        """The number of the newest that all ranks have; 0: none."""
        return self._newest or 0

    @property
    def is_there(self) -> bool:
        """Whether this rank has any, whatever the others have."""
        return any(file.number for file in self._files)

    @property
    def mark(self) -> Mark | None:
        """Where the data was at the newest; None: it is not of the position that there is now."""
        mark = self._marks.get(self.newest)
        return mark if mark is not None and self._keeper.position.made(mark) else None

    def prepare(self) -> None:
        """Get ready to write; a run begins.

        Collective: every rank must call this.

        Raises:
            FsdpError: if there is no place for snapshots.
        """
        if not self._files:
            raise FsdpError("--snapshot-every needs the engines on this host; leave it out")
        self.agree()  # also if this rank knows it: a peer may be a new engine

    def forget(self) -> None:
        """Drop every snapshot, and give their memory back: another model is built."""
        for file in self._files:
            file.forget()
        self._newest, self.file = 0, None
        self._marks.clear()

    def write(self, content: Callable[[Packer], Content]) -> tuple[int, str]:
        """Write a snapshot, which counts if all ranks can.

        Collective: every rank must call this.

        Args:
            content: packs it.

        Returns:
            Its mean size in bytes, and why this rank could not write it.
        """
        assert self._newest is not None
        number = self._newest + 1
        file = next(file for file in self._files if file is not self.file)
        size, reason = 0, ""
        try:
            packer = Packer()
            made = content(packer)
            size = file.write(number, made, packer.tensors, step=made.step)
        except Exception as error:  # no memory, or a person's object that cannot be pickled
            reason = str(error) or type(error).__name__
        flag = Flag.NO_SNAPSHOT if reason else Flag.NONE
        agreed, blocks = self._world.vote.take(flag, count=-(-size // KIB))
        if Flag.NO_SNAPSHOT in agreed:
            file.forget()
            return 0, reason
        older = self._newest
        self._newest, self.file = number, file
        self._marks = {n: mark for n, mark in self._marks.items() if n == older}
        self._marks[number] = self._keeper.position.lean_mark()
        return blocks * KIB // self._world.world_size, ""

    def parts(self, packer: Packer, subjects: Subjects) -> dict[str, Any]:
        """Return everything that training changes, as it is now, by the fields of ``Content``."""
        self.show_shards()
        return {
            "training": packer.pack(randomness.capture()),
            "scaler": self._keeper.scaler.state_dict(),
            "process": packer.pack(self._keeper.randomness.outside),
            "models": {n: packer.module(each) for n, each in subjects.models.items()},
            "modules": {n: packer.module(each) for n, each in subjects.modules.items()},
            "optimizers": {n: packer.optimizer(each) for n, each in subjects.optimizers.items()},
            "schedulers": {n: packer.scheduler(each) for n, each in subjects.schedulers.items()},
        }

    def agree(self) -> int:
        """Find the newest snapshot that all ranks have; 0: none.

        Collective: every rank must call this.
        """
        numbers = {file.number: file for file in self._files}
        everybody: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(everybody, set(numbers))
        self._newest = max(set.intersection(*everybody) - {0}, default=0)
        self.file = numbers[self._newest] if self._newest else None
        return self._newest

    def subjects(self) -> Subjects:
        """Return what training changes on this rank."""
        self.show_shards()
        return subjects_of(self._keeper.namespace, self._keeper.models)

    def show_shards(self) -> None:
        """Have parameters of models be their shards, also after a forward that gathered them."""
        for model in self._keeper.models.values():
            if model.alive:
                model.reshard()


class RunSnapshots:
    """The snapshots of one run.

    Args:
        snapshots: of this rank.
        every: so many steps.
        run_id: of the run.
        data: what it reads, by name.
        epoch: of the newest step before the run.
        epochs_ended: -> of the run so far.

    Attributes:
        notes: sentences a person should read.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        *,
        every: int,
        run_id: int,
        data: Mapping[str, Track],
        epoch: int,
        epochs_ended: Callable[[], int],
    ) -> None:
        self.notes: list[str] = []
        self._snapshots = snapshots
        self._every = every
        self._run_id = run_id
        self._data = data
        self._epoch = epoch
        self._epochs_ended = epochs_ended
        self._subjects = snapshots.subjects()
        self._newest_step: int | None = None
        self._told = self._failed = False

    def begin(self, step: int) -> None:
        """Make one before the first step.

        Collective: every rank must call this.

        Args:
            step: steps of training done.
        """
        self._take(step, self._epoch)

    def after_step(self, step: int, *, epoch: int) -> None:
        """Make one after a step and all that followed it, if it is time.

        Collective: every rank must call this.
        """
        if step % self._every == 0:
            self._take(step, epoch)

    def _take(self, step: int, epoch: int) -> None:
        def content(packer: Packer) -> Content:
            return Content(
                step=step,
                epoch=epoch,
                run_id=self._run_id,
                epochs_ended=self._epochs_ended(),
                places={name: track.place for name, track in self._data.items()},
                sequential=tuple(n for n, track in self._data.items() if track.is_sequential),
                **self._snapshots.parts(packer, self._subjects),
            )

        size, reason = self._snapshots.write(content)
        self._tell(step, size, reason)
        self._newest_step = step if size else self._newest_step

    def _tell(self, step: int, size: int, reason: str) -> None:
        """Say once what snapshots take, and once that one could not be made."""
        # the one from before the first step may lack the optimizers' state
        if size and self._newest_step is not None and not self._told:
            self._told = True
            times = "step" if self._every == 1 else f"{self._every:,} steps"
            self.notes.append(
                f"a snapshot every {times} takes {bytes_text(size)} of host memory a rank, twice"
            )
        elif reason and not self._failed:
            self._failed = True
            before = self._newest_step
            stays = "there is none" if before is None else f"the one of step {before:,} stays"
            self.notes.append(f"the snapshot of step {step:,} was not made ({reason}); {stays}")
