"""ENGINE: what an engine keeps between cells, and the frame in which it runs one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from fsdp_magic.core.comparison import CompareRequest
from fsdp_magic.core.reply import Failure
from fsdp_magic.engine import cells, out_of_memory, randomness
from fsdp_magic.engine.cell_events import CellEvents
from fsdp_magic.engine.children import children_end
from fsdp_magic.engine.fsdp_in_cells import FsdpInCells
from fsdp_magic.engine.grad_scaler import fresh_scaler
from fsdp_magic.engine.groups import is_broken_transport
from fsdp_magic.engine.held import much_held
from fsdp_magic.engine.interrupts import INTERRUPTS, ReleasedByPeerError
from fsdp_magic.engine.lost_models import LostModels
from fsdp_magic.engine.memory_limit import limited
from fsdp_magic.engine.micro_step import BINDABLE
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.position import Position
from fsdp_magic.engine.printing import PRINTING
from fsdp_magic.engine.randomness import TrainingRandomness
from fsdp_magic.engine.restoration import Restoration
from fsdp_magic.engine.service import Service, Tick
from fsdp_magic.engine.snapshots import Snapshots
from fsdp_magic.engine.whereabouts import LOCATOR
from fsdp_magic.engine.world import World


class PutsBack(Protocol):
    """What keeps everything as it was, while steps are taken that must not last."""

    def spread_by(self, request: CompareRequest) -> AbstractContextManager[Any]:
        """Have the models inside as a request wants them."""

    def put_back(self) -> None:
        """Have everything as it was."""


class State:
    """What an engine keeps between cells, and how it runs one.

    Args:
        shell: its IPython, whose namespace holds the person's variables.
    """

    def __init__(self, *, shell: Any) -> None:
        self.shell = shell
        self.namespace: dict[str, Any] = shell.user_ns
        self.names = Names(self.namespace)
        self.models: dict[str, ShardedModel] = {}
        self.lost_models = LostModels(self.namespace, has_snapshot=self._has_snapshot)
        self.position = Position()
        self.steps = 0
        self.epoch = 0
        self.comparison: PutsBack | None = None
        self._ran_out = False
        self._scaler: GradScaler | None = None
        self._world: World | None = None
        self._service: Service | None = None
        self._randomness: TrainingRandomness | None = None
        self._handle: FsdpInCells | None = None
        self._snapshots: Snapshots | None = None
        self._restoration: Restoration | None = None

    @property
    def world(self) -> World:
        """The world; joined before any verb that needs it is sent."""
        assert self._world is not None
        return self._world

    @property
    def randomness(self) -> TrainingRandomness:
        """The random state of training cells."""
        assert self._randomness is not None
        return self._randomness

    @property
    def scaler(self) -> GradScaler:
        """The fp16 scaler of training cells."""
        assert self._scaler is not None
        return self._scaler

    @property
    def handle(self) -> FsdpInCells:
        """The ``fsdp`` that cells find."""
        assert self._handle is not None
        return self._handle

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots of this rank."""
        assert self._snapshots is not None
        return self._snapshots

    @property
    def restoration(self) -> Restoration:
        """What goes back to them."""
        assert self._restoration is not None
        return self._restoration

    def _has_snapshot(self) -> bool:
        """Return whether a model that is built again may get one."""
        return self._snapshots is not None and self._snapshots.is_there

    def names_of_cells(self) -> dict[str, Any]:
        """Return the names that every cell finds."""
        return {**self.world.names(), "fsdp": self.handle}

    def living_models(self) -> list[ShardedModel]:
        """Return the sharded models that are still there."""
        return [model for model in self.models.values() if model.alive]

    def start_anew(self) -> None:
        """Count from the beginning: a model was built."""
        self.steps, self.epoch, self.position = 0, 0, Position()
        self._scaler = fresh_scaler(self.world.device)

    def end_comparison(self) -> None:
        """Have everything as it was before a comparison, if one is under way."""
        comparison, self.comparison = self.comparison, None
        if comparison is not None:
            comparison.put_back()
            del comparison
            gc.collect()  # modules and what spread them hold themselves in cycles

    def enter(self, world: World) -> None:
        """Take a place in the world."""
        self._world = world
        self._scaler = fresh_scaler(world.device)
        LOCATOR.enter(world)
        self._service = Service(world)
        self._randomness = TrainingRandomness(world.request.seed, world.rank)
        self._handle = FsdpInCells(world.rank, world.world_size)
        self._snapshots = Snapshots(world, self)
        self._restoration = Restoration(self._snapshots, world, self)
        self.lost_models.hear(world.request.lost_models)

    def meet_fresh_ranks(self, replaced: tuple[int, ...]) -> None:
        """Come to the same state as ranks with fresh engines, or with the others as one of them.

        Models whose shards are gone are lost; steps count anew; plain cells draw alike again.

        Collective: every rank must call this.
        """
        self.restoration.forget()
        self.lost_models.lose(self.living_models())
        self.models.clear()
        self.start_anew()
        source = next(r for r in range(self.world.world_size) if r not in replaced)
        said = [(self.lost_models.told(), randomness.capture())]
        dist.broadcast_object_list(said, src=source)
        if self.world.rank in replaced:
            self.lost_models.hear(said[0][0])
            randomness.restore(said[0][1])

    def failure(self, error: BaseException, verb: str, *, advice: str | None = None) -> Failure:
        """Return what a person needs to know about an exception.

        Args:
            error: whose frames are still there.
            verb: that raised it.
            advice: what to try if memory ran out; None: what the verb calls for.
        """
        failure = cells.describe(error)
        self._ran_out |= failure.kind == "out_of_memory"
        if failure.memory is None:
            return failure
        if advice is None:
            defaults, ranks = self.world.request.defaults, self.world.world_size
            advice = out_of_memory.advice_for(verb, strategy=defaults.strategy, ranks=ranks)
        return failure.with_advice(advice)

    def with_held(self, failure: Failure, code: str) -> Failure:
        """Say which names of a cell still hold much memory, if it ran out.

        To be called when the frames of the exception are gone, and with them what they held.
        """
        if failure.memory is None:
            return failure
        gc.collect()
        names = cells.names_filled_by(code, shell=self.shell)
        held = much_held(
            self.namespace,
            names,
            device=self.world.device,
            capacity_bytes=failure.memory.capacity_bytes,
        )
        return failure.with_held(held)

    def give_memory_back(self) -> None:
        """Give back what the allocator keeps, if memory has run out since the last time."""
        if self._ran_out:
            self._ran_out = False
            out_of_memory.give_back(self.world.device)

    @contextmanager
    def cell(
        self, values: Mapping[str, Any], *, code: str | None = None, tick: Tick | None = None
    ) -> Iterator[None]:
        """Run the person's code inside: names bound, peers watched.

        If it raises, the transports are given up, so that no peer goes on waiting. Afterwards
        gathered parameters are freed, so that the next cell sees the shards.

        Args:
            values: names that it finds.
            code: the cell, for what listens to IPython's events; None: no cell.
            tick: called by the service thread.
        """
        assert self._service is not None
        events = CellEvents(self.shell, code)
        STEPS.reset()
        with (
            cells.outside_event_loop(),
            self.names.bound(values) as hidden,
            self._service.watching(tick),
            limited(),
        ):
            if hidden:
                _say_hidden(hidden)
            try:
                events.before()
                with children_end():
                    yield
                for model in self.living_models():
                    model.reshard()
            except BaseException as error:
                INTERRUPTS.close()
                events.failed(error)
                self._note_fresh(error)
                if self.world.released and is_broken_transport(error):
                    # a peer let go first, and the collective that waited for it broke
                    raise ReleasedByPeerError().with_traceback(error.__traceback__) from None
                self.world.release()
                raise
            finally:
                events.after()
                PRINTING.flush()

    @contextmanager
    def training_cell(
        self, values: Mapping[str, Any], *, code: str, kept: bool, tick: Tick | None = None
    ) -> Iterator[None]:
        """Run a training or evaluation cell inside; see ``cell``.

        Args:
            values: names that it finds.
            code: the cell.
            kept: whether the random state of training goes on from where it ends.
            tick: called by the service thread.
        """
        with (
            self.cell(values, code=code, tick=tick),
            self.names.set_aside(BINDABLE) as aside,
            self.randomness.in_place(kept=kept),
        ):
            if aside:
                _say_hidden(aside)
            yield

    def _note_fresh(self, error: BaseException) -> None:
        """Tell a person where the variables of an engine went that is not there any more."""
        if isinstance(error, NameError) and self.world.rank in self.world.request.replaced:
            error.add_note(
                f"Rank {self.world.rank} has a fresh engine since %fsdp_restart; run the cells "
                "again that made its variables."
            )


def _say_hidden(hidden: tuple[str, ...]) -> None:
    """Tell a person once that names of theirs stand aside while cells run."""
    names = ", ".join(f"`{name}`" for name in hidden)
    print(
        f"fsdp_magic: in a cell {names} is the extension's; your own value is back after it",
        file=sys.stderr,
    )
