"""ENGINE: a training run from its request to its report: what it trains, its data, its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from ipyparallel.datapub import publish_data
from torch.optim import Optimizer

from fsdp_magic.core.protocol import PROGRESS_KEY, TrainRequest
from fsdp_magic.core.telemetry import DeviceSample, MemorySample, ProgressReport, RunReport
from fsdp_magic.engine import gradients, telemetry
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.fsdp_in_cells import FsdpInCells
from fsdp_magic.engine.loop import running
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.out_of_memory import advice_for_models, advice_for_training
from fsdp_magic.engine.preparation import Preparation
from fsdp_magic.engine.prepared import Prepared
from fsdp_magic.engine.state import State
from fsdp_magic.engine.step import cleared_after_failure
from fsdp_magic.engine.time_share import TimeShare
from fsdp_magic.engine.world import World

_PUBLISH_SECONDS = 0.4
_SAMPLE_SECONDS = 0.1


class TrainingRun:
    """One run on one rank: prepared, run, watched and reported.

    Args:
        request: what was asked.
        world: this rank's.
        names: of the namespace that the cell runs in.
        handle: the ``fsdp`` of the cell.
    """

    def __init__(
        self, request: TrainRequest, *, world: World, names: Names, handle: FsdpInCells
    ) -> None:
        self._request = request
        self._world = world
        self._names = names
        self._handle = handle
        self._notes: list[str] = []
        self._prepared: Prepared | None = None
        self._put_back = ExitStack()
        self._first_step = 0
        self._published_steps = 0
        self._activities: list[DeviceSample] = []
        self._device_name = telemetry.device_name(world.device)
        self._sampling = TimeShare(least_seconds=_SAMPLE_SECONDS)
        self._started = self._published_at = time.monotonic()

    def names(self) -> dict[str, Any]:
        """Return the names that the cell finds beside those of every cell."""
        names: dict[str, Any] = {
            "step": 0,
            "micro_step": 0,
            "epoch": 0,
            "micro_batch_size": self._request.spec.micro_batch_size,
            "total_steps": self._request.spec.steps,
        }
        if self._request.spec.data is not None:
            names["batch"] = None
        return names

    @property
    def finished(self) -> int:
        """Steps done."""
        return 0 if self._prepared is None else self._prepared.loop.records.finished

    @property
    def epoch(self) -> int:
        """The epoch of the newest step."""
        return 0 if self._prepared is None else self._prepared.loop.epoch

    @property
    def advice(self) -> str:
        """What to try if it ran out of memory."""
        run, ranks = self._prepared, self._world.world_size
        if run is None:
            return "try " + advice_for_models(
                strategy=self._world.request.defaults.strategy, ranks=ranks
            )
        return advice_for_training(
            self._request.spec,
            micro_batch_size=None if run.data is None else run.data.micro_batch_size,
            accumulate=run.loop.micro_steps,
            strategy=next((model.strategy for model in run.models), "full_shard"),
            ranks=ranks,
        )

    # -- preparing

    def prepare(
        self,
        cell: Cell,
        *,
        evaluation_cell: Cell | None,
        kept: State,
    ) -> None:
        """Find what is trained and where the data is; shard what never was.

        Collective: every rank must call this.
        """
        self._first_step = kept.steps
        preparation = Preparation(
            self._request,
            world=self._world,
            names=self._names,
            handle=self._handle,
            put_back=self._put_back,
        )
        self._notes = preparation.notes
        self._prepared = preparation.prepare(
            cell,
            evaluation_cell=evaluation_cell,
            kept=kept,
        )

    # -- running

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back.close()  # what a trial changed, also one that failed as it began
        if self._request.spec.trial:
            STEPS.reset()

    def look_at_memory(self) -> None:
        """Remember this moment if it is the height so far; from any thread."""
        if self._prepared is not None:
            self._prepared.memory.look()

    def forget_peak(self) -> MemorySample:
        """Count the height from here, and return that so far; between steps."""
        assert self._prepared is not None
        return self._prepared.memory.forget_peak()

    def follow_steps(self, watch: Callable[[], None]) -> None:
        """Call something after each step and all that follows it; between ``prepare`` and steps."""
        assert self._prepared is not None
        self._prepared.loop.watch = watch

    def steps(self) -> None:
        """Take the steps.

        Collective: every rank must call this.
        """
        assert self._prepared is not None
        run = self._prepared
        self._started = time.monotonic()
        with ExitStack() as stack:
            if run.data is not None:
                stack.callback(run.data.close)
            stack.enter_context(run.guards.in_place())
            stack.enter_context(running(self._handle))
            if not self._request.spec.manual:  # a manual cell averages gradients, as FSDP2 does
                gradients.clear(run.trained.parameters)
                for model in run.models:
                    stack.enter_context(model.added_up())
            stack.enter_context(cleared_after_failure(run.trained))
            run.loop.run(first_step=self._first_step, total_steps=run.total_steps)

    # -- watching, from the service thread

    def tick(self, now: float) -> None:
        """Sample and publish when it is time; called some fifty times a second."""
        run = self._prepared
        if run is None:
            return
        if self._sampling.is_due(now):
            with self._sampling.spending():
                run.memory.look()
        if now - self._published_at >= _PUBLISH_SECONDS:
            self._published_at = now
            self._publish(run)

    def _publish(self, run: Prepared) -> None:
        (now, peak), loop = run.memory.now_and_peak(), run.loop
        activity = telemetry.activity(self._world.device)
        self._activities.append(activity)
        records = loop.records.since(self._published_steps)
        self._published_steps += len(records.losses)
        report = ProgressReport(
            run_id=self._request.run_id,
            rank=self._world.rank,
            steps=self._published_steps,
            total_steps=run.total_steps,
            records=records,
            memory=now,
            peak_memory=peak,
            activity=activity,
            seconds=time.monotonic() - self._started,
            device_name=self._device_name,
            first_step=self._first_step,
            micro_batch_size=loop.micro_batch_size,
            accumulate=loop.micro_steps,
            has_losses=loop.records.has_losses,
            evaluations=tuple(run.after.evaluations),
            non_finite_steps=tuple(self._first_step + i for i in loop.records.non_finite),
            skipped=loop.step.skipped,
            learning_rate=_learning_rate(run.trained.optimizers.values()),
            notes=self._all_notes(run),
        )
        publish_data({PROGRESS_KEY: report})

    def report(self) -> RunReport | None:
        """Return how the run ended on this rank; None if it never began."""
        run = self._prepared
        if run is None:
            return None
        (now, peak), loop = run.memory.now_and_peak(), run.loop
        loop.records.complete()
        return RunReport(
            rank=self._world.rank,
            steps=loop.records.finished,
            total_steps=run.total_steps,
            stopped=loop.stopped,
            seconds=time.monotonic() - self._started,
            records=loop.records.since(0),
            memory=now,
            peak_memory=peak,
            mean_activity=_mean(self._activities),
            epochs_ended=run.after.epochs_ended,
            device_name=self._device_name,
            first_step=self._first_step,
            micro_batch_size=loop.micro_batch_size,
            accumulate=loop.micro_steps,
            has_losses=loop.records.has_losses,
            evaluations=tuple(run.after.evaluations),
            non_finite_steps=tuple(self._first_step + i for i in loop.records.non_finite),
            skipped=loop.step.skipped,
            learning_rate=_learning_rate(run.trained.optimizers.values()),
            notes=self._all_notes(run),
        )

    def _all_notes(self, run: Prepared) -> tuple[str, ...]:
        of_data = [] if run.data is None else run.data.notes
        of_snapshots = [] if run.snapshots is None else run.snapshots.notes
        return (*self._notes, *of_data, *run.loop.notes, *of_snapshots)


def _learning_rate(optimizers: Iterable[Optimizer]) -> float | None:
    """Return the first group's learning rate; one in a tensor is not read from another thread."""
    for optimizer in optimizers:
        rate = optimizer.param_groups[0].get("lr")
        return float(rate) if isinstance(rate, (int, float)) else None
    return None


def _mean(samples: list[DeviceSample]) -> DeviceSample:
    def mean(read: Callable[[DeviceSample], float | None]) -> float | None:
        known = [value for sample in samples if (value := read(sample)) is not None]
        return sum(known) / len(known) if known else None

    return DeviceSample(
        utilisation_percent=mean(lambda s: s.utilisation_percent),
        temperature_celsius=mean(lambda s: s.temperature_celsius),
        power_watts=mean(lambda s: s.power_watts),
    )
