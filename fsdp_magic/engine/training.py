"""ENGINE: a training run from its request to its report: what it trains, its data, its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ipyparallel.datapub import publish_data

from fsdp_magic.core.batch import GlobalBatch
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.protocol import PROGRESS_KEY, TrainRequest
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import DeviceSample, ProgressReport, RunReport
from fsdp_magic.engine import gradients, modeling, telemetry
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.data import Data, Position
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.parallel import fsdp
from fsdp_magic.engine.parallel.fsdp import ShardedModel
from fsdp_magic.engine.sources import micro_batch_size_of
from fsdp_magic.engine.step import StepLoop, cleared_after_failure
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.trained import (
    Trained,
    find_trained,
    put_in_train_mode,
    take_whole_from_rank_0,
)
from fsdp_magic.engine.world import World

_PUBLISH_SECONDS = 0.4
_SAMPLE_SECONDS = 0.1


def open_data(
    spec: TrainSpec, namespace: Mapping[str, Any], *, world: World, position: Position
) -> Data | None:
    """Return the data that a run reads; None if the cell brings its own.

    Raises:
        FsdpError: if a name leads nowhere, or the data cannot be cut as asked.
    """
    if spec.data is None:
        return None
    source = evaluate(spec.data, namespace, flag="--data")
    size = micro_batch_size_of(source, spec.micro_batch_size)
    batch = GlobalBatch(
        micro_batch_size=size or 1,
        accumulate=spec.accumulate,
        data_parallel_size=world.world_size,
    )
    collate = None
    if spec.collate is not None:
        collate = evaluate(spec.collate, namespace, flag="--collate")
    return Data(
        source,
        batch=batch,
        rank=world.rank,
        seed=world.request.seed,
        shuffle=not spec.no_shuffle,
        collate=collate,
        goes_round=spec.steps is not None or spec.epochs is not None,
        device=world.device,
        position=position,
    )


def evaluate(expression: str, namespace: Mapping[str, Any], *, flag: str) -> Any:
    """Return what a name on a magic's line stands for on the engines.

    Raises:
        FsdpError: if it stands for nothing.
    """
    try:
        return eval(expression, dict(namespace))
    except (NameError, AttributeError, LookupError, SyntaxError) as error:
        raise FsdpError(
            f"{flag} {expression} is not there on the engines ({error}); bind it in a %%fsdp cell"
        ) from None


def length(spec: TrainSpec, data: Data | None) -> int | None:
    """Return the number of steps of a run; None: to the end of data of unknown length."""
    if spec.steps is not None:
        return spec.steps
    if data is None:
        return 1
    if data.steps_per_epoch is None:
        if spec.epochs not in (None, 1):
            raise FsdpError(
                f"--epochs {spec.epochs} needs data whose length is known; give --steps N"
            )
        return None
    return data.steps_per_epoch * (spec.epochs or 1)


class TrainingRun:
    """One run on one rank: prepared, run, watched and reported.

    Args:
        request: what was asked.
        world: this rank's.
        names: of the namespace that the cell runs in.
    """

    def __init__(self, request: TrainRequest, *, world: World, names: Names) -> None:
        self._request = request
        self._world = world
        self._names = names
        self._namespace = names.namespace
        self._notes: list[str] = []
        self._loop: StepLoop | None = None
        self._trained: Trained | None = None
        self._memory: MemoryWatch | None = None
        self._first_step = 0
        self._total_steps = request.spec.steps
        self._published_steps = 0
        self._activities: list[DeviceSample] = []
        self._device_name = telemetry.device_name(world.device)
        self._started = self._published_at = self._sampled_at = time.monotonic()

    def names(self) -> dict[str, Any]:
        """Return the names that the cell finds beside those of every cell."""
        names: dict[str, Any] = {
            "step": 0,
            "micro_step": 0,
            "epoch": 0,
            "micro_batch_size": self._request.spec.micro_batch_size,
            "total_steps": self._total_steps,
        }
        if self._request.spec.data is not None:
            names["batch"] = None
        return names

    @property
    def finished(self) -> int:
        """Steps done."""
        return 0 if self._loop is None else self._loop.records.finished

    def prepare(self, cell: Cell, *, models: dict[str, ShardedModel], position: Position) -> None:
        """Find what is trained and where the data is; shard what never was.

        Collective: every rank must call this.
        """
        spec, world = self._request.spec, self._world
        self._notes += modeling.shard_forgotten(self._namespace, models=models, world=world)
        sharded = [model for model in models.values() if model.alive]
        self._trained, notes = find_trained(self._namespace, sharded)
        self._notes += notes + put_in_train_mode(sharded, self._trained)
        self._notes += take_whole_from_rank_0(self._trained, world)
        data = open_data(spec, self._namespace, world=world, position=position)
        self._total_steps = length(spec, data)
        self._notes += [] if data is None else data.notes
        parameters = [p for model in sharded for p in model.module.parameters()]
        telemetry.reset_peak()
        self._memory = MemoryWatch(
            [*parameters, *self._trained.parameters], list(self._trained.optimizers.values())
        )
        self._models = sharded
        size = None if data is None else data.micro_batch_size
        self._names.bind({"total_steps": self._total_steps, "micro_batch_size": size})
        self._loop = StepLoop(
            cell,
            self._names,
            world=world,
            trained=self._trained,
            data=data,
            accumulate=spec.accumulate,
            max_grad_norm=spec.max_grad_norm,
            stopping=lambda: world.page.stopping_run == self._request.run_id,
            memory=self._memory,
        )

    def steps(self, *, first_step: int) -> None:
        """Take the steps.

        Collective: every rank must call this.
        """
        assert self._loop is not None
        assert self._trained is not None
        self._first_step = first_step
        self._started = time.monotonic()
        gradients.clear(self._trained.parameters)
        with (
            cleared_after_failure(self._trained),
            fsdp.gradients_added_up(self._models, self._world),
        ):
            self._loop.run(first_step=first_step, total_steps=self._total_steps)

    # -- watching, from the service thread

    def tick(self, now: float) -> None:
        """Sample and publish when it is time; called some fifty times a second."""
        if self._memory is None or self._loop is None:
            return
        if now - self._sampled_at >= _SAMPLE_SECONDS:
            self._sampled_at = now
            self._memory.look()
        if now - self._published_at >= _PUBLISH_SECONDS:
            self._published_at = now
            self._publish(self._memory, self._loop)

    def _publish(self, memory: MemoryWatch, loop: StepLoop) -> None:
        activity = telemetry.activity(self._world.device)
        self._activities.append(activity)
        records = loop.records.since(self._published_steps)
        self._published_steps += len(records.losses)
        report = ProgressReport(
            run_id=self._request.run_id,
            rank=self._world.rank,
            steps=self._published_steps,
            total_steps=self._total_steps,
            records=records,
            memory=memory.now(),
            peak_memory=memory.peak(),
            activity=activity,
            seconds=time.monotonic() - self._started,
            device_name=self._device_name,
            first_step=self._first_step,
            samples_per_step=loop.samples_per_step,
            micro_batch_size=loop.micro_batch_size,
            notes=(*self._notes, *loop.notes),
        )
        publish_data({PROGRESS_KEY: report})

    def report(self) -> RunReport | None:
        """Return how the run ended on this rank; None if it never began."""
        memory, loop = self._memory, self._loop
        if memory is None or loop is None:
            return None
        loop.records.complete()
        return RunReport(
            rank=self._world.rank,
            steps=loop.records.finished,
            total_steps=self._total_steps,
            stopped=loop.stopped,
            seconds=time.monotonic() - self._started,
            records=loop.records.since(0),
            memory=memory.now(),
            peak_memory=memory.peak(),
            mean_activity=_mean(self._activities),
            device_name=self._device_name,
            first_step=self._first_step,
            samples_per_step=loop.samples_per_step,
            micro_batch_size=loop.micro_batch_size,
            notes=(*self._notes, *loop.notes),
        )


def _mean(samples: list[DeviceSample]) -> DeviceSample:
    def mean(read: Callable[[DeviceSample], float | None]) -> float | None:
        known = [value for sample in samples if (value := read(sample)) is not None]
        return sum(known) / len(known) if known else None

    return DeviceSample(
        utilisation_percent=mean(lambda s: s.utilisation_percent),
        temperature_celsius=mean(lambda s: s.temperature_celsius),
        power_watts=mean(lambda s: s.power_watts),
    )
