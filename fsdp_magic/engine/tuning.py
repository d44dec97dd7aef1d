"""ENGINE: a search for a micro-batch size: what its steps change, kept and put back.

``room`` says how far a search can go. ``hold`` keeps everything that steps change, in host
memory, so that no device has less room for it. ``compare`` then takes steps of one size after the
other, on the models as they are, and each time everything is put back before it answers, however
the steps ended. ``put_back`` lets go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.core.comparison import CompareRequest
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.reply import Reply
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.core.tuning import HoldRequest, RoomReport, RoomRequest
from fsdp_magic.engine import memory_limit, modeling, out_of_memory, randomness, telemetry
from fsdp_magic.engine.feeding import named_sources, names_of, open_data
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.position import Position
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.rollback import Snapshot
from fsdp_magic.engine.sources import Ready, kind_of
from fsdp_magic.engine.state import State
from fsdp_magic.engine.track import is_function


class Held:
    """Everything that steps change, as it was when this was made.

    Args:
        engine: whose it is.
    """

    def __init__(self, engine: State) -> None:
        self._engine = engine
        self._mark = engine.position.mark()
        self._random = randomness.capture()
        self._training = engine.randomness.state
        self._scaler = engine.scaler.state_dict()
        optimizers = list(reachable(engine.namespace, Optimizer).values())
        modules = [model.module for model in engine.living_models()]
        modules += reachable(engine.namespace, nn.Module).values()
        trained = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        schedulers = reachable(engine.namespace, LRScheduler).values()
        self._snapshot = Snapshot(modules, trained, optimizers, schedulers, on_host=True)
        self._is_changed = False

    @contextmanager
    def spread_by(self, request: CompareRequest) -> Iterator[dict[str, ShardedModel]]:
        """Have steps taken inside, on the models as they are."""
        assert request.variant is None  # strategies are for models that are set aside
        out_of_memory.give_back(self._engine.world.device)  # what the last size left
        self._is_changed = True
        try:
            yield self._engine.models
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Have everything as it was."""
        if not self._is_changed:
            return
        engine = self._engine
        self._snapshot.restore()
        randomness.restore(self._random)
        engine.randomness.state = self._training
        engine.scaler.load_state_dict(self._scaler)
        engine.position.back(self._mark)
        STEPS.reset()
        self._is_changed = False


def room(engine: State, request: RoomRequest) -> Reply:
    """Say what there is room for; the report is a ``RoomReport``.

    Collective: every rank must call this.
    """
    mark = engine.position.mark()
    with engine.cell({}), randomness.put_back():
        try:
            most_samples = _most_samples(engine, request.spec)
        finally:
            engine.position.back(mark)
    models = engine.living_models()
    memory = telemetry.MemoryWatch(
        [p for model in models for p in model.module.parameters()],
        list(reachable(engine.namespace, Optimizer).values()),
    ).now()
    report = RoomReport(
        most_samples=most_samples,
        room_bytes=max(0, _room(engine, memory)),
        capacity_bytes=memory.capacity_bytes or 0,
        held_bytes=memory.allocated_bytes,
        other_bytes=memory.activation_bytes,
    )
    return Reply(rank=engine.world.rank, report=report)


def hold(engine: State, _: HoldRequest) -> Reply:
    """Keep what steps change; nothing is changed but that a model that was forgotten is sharded.

    Collective: every rank must call this.
    """
    with engine.cell({}):
        if engine.restoration.waits:
            raise FsdpError(
                "a snapshot is not wholly put back before the next run; run a %%fsdp_train cell "
                "first"
            )
        modeling.shard_forgotten(engine.namespace, models=engine.models, world=engine.world)
        held = Held(engine)
        engine.world.vote.take()  # from here on no rank fails
    engine.comparison = held
    return Reply(rank=engine.world.rank)


def _room(engine: State, memory: MemorySample) -> int:
    """Return what tensors may take on this rank's device, what is held already included.

    On a GPU that is all but what others have of it. On a CPU of which nobody said how much may be
    taken it is the rank's share of what is free: the system lends more than there is, and ends
    processes when that is used.
    """
    capacity = memory.capacity_bytes or 0
    if engine.world.device.type == "cuda" or memory_limit.is_set():
        return capacity - memory.other_bytes
    free: int = psutil.virtual_memory().available // engine.world.request.local_world_size
    return min(capacity, memory.allocated_bytes + free)


def _most_samples(engine: State, spec: TrainSpec) -> int | None:
    """Return the largest micro-batch size of which the data fill a step; None: not known.

    Raises:
        FsdpError: if the size of its batches cannot be changed, or it fills no step at all.
    """
    position, namespace = engine.position, engine.namespace
    try:
        data = open_data(
            replace(spec, micro_batch_size=1), namespace, world=engine.world, position=position
        )
    except FsdpError:
        _refuse_ready(spec, namespace, position)
        raise
    assert data is not None  # a spec without data was refused
    data.close()
    if spec.global_batch_size is not None:
        return spec.global_batch_size // _sharing(engine, spec)
    return data.steps_per_epoch


def _refuse_ready(spec: TrainSpec, namespace: dict[str, Any], position: Position) -> None:
    """Raise if any of the data yields batches that are made already."""
    for name, source in zip(names_of(spec), named_sources(spec, namespace), strict=True):
        made = position.cursor(source).place.made if is_function(source) else source
        if made is not None and isinstance(kind_of(made), Ready):
            raise FsdpError(
                f"--data {name} yields ready batches, whose size %fsdp_tune cannot change; give "
                "it the samples: a data set, or a DataLoader of one"
            )


def _sharing(engine: State, spec: TrainSpec) -> int:
    """Return how many ranks divide the data."""
    return engine.world.world_size if spec.data_sharding == "auto" else 1
