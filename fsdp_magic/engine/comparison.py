"""ENGINE: a training cell under several strategies, and everything as before afterwards.

Three verbs. ``set_aside`` keeps the models and optimizers as they are; ``compare`` spreads plain
ones with the same content by one strategy, runs the cell as a run, and drops them again, however
that ended; ``put_back`` has everything as it was. Only the first needs the other ranks for what
must not be lost, and it changes nothing before all have agreed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.core.comparison import (
    CompareReport,
    CompareRequest,
    PutBackRequest,
    SetAsideReport,
    SetAsideRequest,
)
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.reply import Reply
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine import cells, memory_limit, modeling, randomness, telemetry
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.measurement import Measurement, idle_bytes
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.optimizers import repoint
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.strategies import spread
from fsdp_magic.engine.position import Mark
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.rollback import Snapshot
from fsdp_magic.engine.set_aside import SetAside
from fsdp_magic.engine.state import State
from fsdp_magic.engine.training import TrainingRun

_NO_RUN = -1
"""Number of a run that nobody asks to stop, and whose progress nobody follows."""


class Comparison:
    """What a comparison has set aside.

    Args:
        engine: whose models they are.
    """

    def __init__(self, engine: State) -> None:
        """Copy what is needed; nothing is changed yet.

        Collective: every rank must make its own.
        """
        self._engine = engine
        names = modeling.bound_names(engine.models, engine.namespace)
        if not names:
            raise FsdpError(
                "there is no sharded model to compare strategies on; build one in %%fsdp_model"
            )
        if engine.restoration.waits:
            raise FsdpError(
                "a snapshot is not wholly put back before the next run; run a %%fsdp_train cell "
                "first"
            )
        self._models_before = dict(engine.models)
        optimizers = reachable(engine.namespace, Optimizer).values()
        modules = reachable(engine.namespace, nn.Module).values()
        schedulers = reachable(engine.namespace, LRScheduler).values()
        self._specs = {name: engine.models[name].spec for name in names}
        self._aside = SetAside({n: engine.models[n] for n in names}, optimizers, engine.world)
        # of the models themselves only buffers and modes: their parameters are set aside
        own = {id(p) for name in names for p in engine.models[name].module.parameters()}
        self._rest = Snapshot(modules, (), (), schedulers, without=own)
        self._random = randomness.capture()
        self._training = engine.randomness.state
        self._scaler = engine.scaler.state_dict()
        self._mark: Mark = engine.position.mark()

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """How the models were spread."""
        return tuple(self._specs.values())

    def take(self) -> None:
        """Take the models away."""
        for name in self._specs:
            self._engine.models.pop(name)
        self._aside.take()

    @contextmanager
    def spread_by(self, request: CompareRequest) -> Iterator[dict[str, ShardedModel]]:
        """Have the models spread by another strategy inside.

        Collective: every rank must call this.
        """
        engine, world = self._engine, self._engine.world
        assert request.variant is not None
        gc.collect()  # modules and what spread them before hold themselves in cycles
        try:
            for name, module in self._aside.plain().items():
                spec = request.variant.applied(self._specs[name])
                model, replaced = spread(module, name=name, spec=spec, world=world)
                engine.models[name] = model
                for optimizer in reachable(engine.namespace, Optimizer).values():
                    repoint(optimizer, replaced)
            yield engine.models
        finally:
            self._drop()

    def put_back(self) -> None:
        """Have everything as it was."""
        self._aside.put_back()
        self._put_rest_back()
        self._engine.models.clear()
        self._engine.models.update(self._models_before)

    def _drop(self) -> None:
        """Drop the models that are spread now, and what running the cell changed."""
        for name in self._specs:
            model = self._engine.models.pop(name, None)
            if model is not None and model.alive:
                model.leave()
        self._aside.forget_plain()
        self._put_rest_back()
        STEPS.reset()

    def _put_rest_back(self) -> None:
        self._rest.restore()
        randomness.restore(self._random)
        self._engine.randomness.state = self._training
        self._engine.scaler.load_state_dict(self._scaler)
        self._engine.position.back(self._mark)


def set_aside(engine: State, _: SetAsideRequest) -> Reply:
    """Keep the models and optimizers as they are; the report is a ``SetAsideReport``.

    Collective: every rank must call this.
    """
    with engine.cell({}):
        comparison = Comparison(engine)
        engine.world.vote.take()  # from here on no rank fails
    engine.comparison = comparison
    comparison.take()
    report = SetAsideReport(
        specs=comparison.specs, ranks_on_host=engine.world.request.local_world_size
    )
    return Reply(rank=engine.world.rank, report=report)


def compare(engine: State, request: CompareRequest) -> Reply:
    """Run the cell under one strategy; the report is its ``CompareReport``.

    Collective: every rank must call this.
    """
    try:
        report = _measured(engine, request)
        report = replace(report, idle_bytes=idle_bytes())
    except BaseException as error:
        INTERRUPTS.close()
        with cells.forgotten(error):
            failure = engine.failure(error, "compare", advice="")
        return Reply(rank=engine.world.rank, failure=failure)
    finally:
        engine.give_memory_back()
    return Reply(rank=engine.world.rank, report=report)


def put_back(engine: State, _: PutBackRequest) -> Reply:
    """Have everything as it was when the models were set aside."""
    engine.end_comparison()
    return Reply(rank=engine.world.rank)


def _measured(engine: State, request: CompareRequest) -> CompareReport:
    """Run the cell under one strategy, and hold nothing of it afterwards.

    Collective: every rank must call this.
    """
    kept = engine.comparison
    assert kept is not None
    asked = TrainRequest(
        code=request.code,
        name=request.name,
        run_id=_NO_RUN,
        spec=request.spec,
        moves_schedulers=request.moves_schedulers,
    )
    run = TrainingRun(asked, world=engine.world, names=engine.names, handle=engine.handle)
    measurement = Measurement(run, engine.world.device)
    values = {**engine.names_of_cells(), **run.names()}
    with engine.training_cell(values, code=request.code, kept=False, tick=measurement.tick):
        cell = cells.compile_training_cell(request.code, request.name, shell=engine.shell)
        with (
            kept.spread_by(request),
            _unbound(cell.assigned, engine.namespace),
            _room_for(request, engine),
            run,
        ):
            return measurement.made(cell, engine)


def _room_for(request: CompareRequest, engine: State) -> AbstractContextManager[None]:
    """Return what refuses memory beyond the room that was given, on a CPU.

    There a height is only seen where somebody looks, and nobody may have looked at the highest.
    """
    if request.room_bytes is None or engine.world.device.type != "cpu":
        return nullcontext()
    memory = telemetry.memory()
    if memory_limit.is_set():
        return memory_limit.lowered((memory.capacity_bytes or 0) - request.room_bytes)
    return memory_limit.room_for(request.room_bytes - memory.allocated_bytes)


@contextmanager
def _unbound(names: Iterable[str], namespace: dict[str, Any]) -> Iterator[None]:
    """Have the values of names afterwards that they had before."""
    before = {name: namespace[name] for name in names if name in namespace}
    try:
        yield
    finally:
        for name in names:
            namespace.pop(name, None)
        namespace.update(before)
