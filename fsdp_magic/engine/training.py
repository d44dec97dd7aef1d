"""ENGINE: a training run from its request to its report: what it trains, its data, its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ipyparallel.datapub import publish_data
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.protocol import PROGRESS_KEY, TrainRequest
from fsdp_magic.core.specs import EvalSpec
from fsdp_magic.core.telemetry import DeviceSample, EvaluationRecord, ProgressReport, RunReport
from fsdp_magic.engine import gradients, modeling, telemetry
from fsdp_magic.engine.aftermath import AfterStep, AfterSteps
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.data import Data
from fsdp_magic.engine.evaluation import Evaluator
from fsdp_magic.engine.expressions import evaluate
from fsdp_magic.engine.feeding import length, open_data
from fsdp_magic.engine.fsdp_in_cells import FsdpInCells
from fsdp_magic.engine.guards import Guards, Refusing
from fsdp_magic.engine.loop import StepLoop, running
from fsdp_magic.engine.manual import ManualStep
from fsdp_magic.engine.micro_step import CellRunner
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.parallel import fsdp
from fsdp_magic.engine.parallel.fsdp import ShardedModel
from fsdp_magic.engine.position import Position
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.rollback import Snapshot, StepUndo
from fsdp_magic.engine.schedulers import Schedulers, find_schedulers
from fsdp_magic.engine.step import AutomaticStep, Step, cleared_after_failure
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.trained import (
    Trained,
    find_trained,
    put_in_train_mode,
    take_whole_from_rank_0,
)
from fsdp_magic.engine.weights import Weighing, label_counter
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
        self._namespace = names.namespace
        self._handle = handle
        self._notes: list[str] = []
        self._loop: StepLoop | None = None
        self._data: Data | None = None
        self._after: AfterSteps | None = None
        self._trained: Trained | None = None
        self._memory: MemoryWatch | None = None
        self._guards: Guards | None = None
        self._evaluation_cell: Cell | None = None
        self._put_back = ExitStack()
        self._models: list[ShardedModel] = []
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

    @property
    def epoch(self) -> int:
        """The epoch of the newest step."""
        return 0 if self._loop is None else self._loop.epoch

    # -- preparing

    def prepare(
        self,
        cell: Cell,
        *,
        evaluation_cell: Cell | None,
        models: dict[str, ShardedModel],
        position: Position,
        steps_done: int,
    ) -> None:
        """Find what is trained and where the data is; shard what never was.

        Collective: every rank must call this.
        """
        self._evaluation_cell = evaluation_cell
        spec, world = self._request.spec, self._world
        self._first_step = steps_done
        self._notes += modeling.shard_forgotten(self._namespace, models=models, world=world)
        self._models = [model for model in models.values() if model.alive]
        trained, notes = find_trained(self._namespace, self._models, manual=spec.manual)
        self._trained = trained
        self._notes += take_whole_from_rank_0(trained, world)
        if spec.trial:
            self._put_back.callback(self._snapshot(trained, position))
        self._notes += notes + put_in_train_mode(self._models, trained)
        weighing = Weighing(spec.loss, late="loss_weight" in cell.assigned)
        data = open_data(
            spec,
            self._namespace,
            world=world,
            position=position,
            count_labels=label_counter(weighing, self._models),
        )
        self._total_steps = self._request.steps_left or length(spec, data)
        self._data = data
        parameters = [p for model in self._models for p in model.module.parameters()]
        telemetry.reset_peak()
        self._memory = MemoryWatch(
            [*parameters, *trained.parameters], list(trained.optimizers.values())
        )
        size = None if data is None else data.micro_batch_size
        end = None if self._total_steps is None else steps_done + self._total_steps
        self._names.bind({"total_steps": end, "micro_batch_size": size})
        step = self._step(cell, trained, has_data=data is not None)
        self._after = self._aftermath(cell, step, data, trained, weighing)
        self._loop = StepLoop(
            step=step,
            world=world,
            data=data,
            weighing=weighing,
            micro_steps=spec.accumulate if data is None else data.accumulate,
            handle=self._handle,
            stopping=self._stopping,
            aftermath=self._after,
            undo=StepUndo(self._modules()),
        )

    def _snapshot(self, trained: Trained, position: Position) -> Callable[[], None]:
        """Return what puts everything back that a trial changes."""
        mark = position.mark()
        snapshot = Snapshot(
            self._modules(),
            trained.parameters,
            trained.optimizers.values(),
            reachable(self._namespace, LRScheduler).values(),
        )

        def put_back() -> None:
            snapshot.restore()
            position.back(mark)

        return put_back

    def _modules(self) -> list[nn.Module]:
        """Return the sharded models and every other module that names lead to."""
        bound = reachable(self._namespace, nn.Module).values()
        return [*(model.module for model in self._models), *bound]

    def _step(self, cell: Cell, trained: Trained, *, has_data: bool) -> Step:
        """Return how a step is taken, with the guards that watch the cell."""
        assert self._memory is not None
        spec = self._request.spec
        schedulers = find_schedulers(self._namespace).values()
        if spec.manual:
            manual = ManualStep(
                world=self._world,
                trained=trained,
                models=self._models,
                memory=self._memory,
                has_data=has_data,
            )
            self._guards = Guards(manual, schedulers)
            manual.runner = CellRunner(cell, self._names, self._guards)
            return manual
        self._guards = Guards(Refusing(), schedulers)
        return AutomaticStep(
            runner=CellRunner(cell, self._names, self._guards),
            world=self._world,
            trained=trained,
            models=self._models,
            memory=self._memory,
            max_grad_norm=spec.max_grad_norm,
            stops_at_nan=spec.nan == "stop",
            has_data=has_data,
        )

    def _aftermath(
        self, cell: Cell, step: Step, data: Data | None, trained: Trained, weighing: Weighing
    ) -> AfterSteps:
        spec = self._request.spec
        assert self._guards is not None
        function = None
        if spec.after_step is not None:
            value = evaluate(spec.after_step, self._namespace, flag="--after-step")
            function = AfterStep(value, world_size=self._world.world_size)
        return AfterSteps(
            step=step,
            schedulers=None if spec.manual else self._schedulers(data, trained),
            function=function,
            evaluate=self._evaluation(cell, weighing),
            every=spec.eval_every,
        )

    def _evaluation(
        self, cell: Cell, weighing: Weighing
    ) -> Callable[[int], EvaluationRecord | None] | None:
        """Return what evaluates after so many steps; None: nothing was asked for."""
        spec, asked = self._request.spec, self._request.evaluation
        if spec.eval_every is None:
            return None
        if spec.eval_data is not None:
            asked_spec = EvalSpec(
                data=spec.eval_data, micro_batch_size=spec.micro_batch_size, collate=spec.collate
            )
        else:
            assert asked is not None  # else the kernel has refused it
            assert self._evaluation_cell is not None
            cell, asked_spec = self._evaluation_cell, asked.spec
            weighing = Weighing("mean", late="loss_weight" in cell.assigned)
        evaluator = Evaluator(
            cell=cell,
            spec=asked_spec,
            weighing=weighing,
            names=self._names,
            world=self._world,
            models=self._models,
            stopping=self._stopping,
        )
        with _explained_for(spec.eval_data):
            evaluator.check()

        def evaluated(step: int) -> EvaluationRecord | None:
            with evaluator.within_training():
                return evaluator.run(step=step, epoch=self.epoch)

        return evaluated

    def _stopping(self) -> bool:
        """Return whether the person has asked this run to stop."""
        return self._world.page.stopping_run == self._request.run_id

    def _schedulers(self, data: Data | None, trained: Trained) -> Schedulers:
        spec, steps = self._request.spec, self._total_steps
        schedulers = Schedulers(
            find_schedulers(self._namespace),
            trained.optimizers.values(),
            every=spec.scheduler_every,
        )
        per_epoch = None if data is None else data.steps_per_epoch
        epochs = None if steps is None or not per_epoch else steps / per_epoch
        schedulers.check(first_step=self._first_step, steps=steps, epochs=epochs)
        schedulers.check_waiting(evaluates=spec.eval_every is not None)
        self._notes += schedulers.notes
        return schedulers

    # -- running

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back.close()  # what a trial changed, also one that failed as it began

    def steps(self) -> None:
        """Take the steps.

        Collective: every rank must call this.
        """
        assert self._loop is not None
        assert self._trained is not None
        assert self._guards is not None
        self._started = time.monotonic()
        with ExitStack() as stack:
            if self._data is not None:
                stack.callback(self._data.close)
            stack.enter_context(self._guards.in_place())
            stack.enter_context(running(self._handle))
            if not self._request.spec.manual:  # a manual cell averages gradients, as FSDP2 does
                gradients.clear(self._trained.parameters)
                stack.enter_context(fsdp.gradients_added_up(self._models, self._world))
            stack.enter_context(cleared_after_failure(self._trained))
            self._loop.run(first_step=self._first_step, total_steps=self._total_steps)

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
            micro_batch_size=loop.micro_batch_size,
            accumulate=loop.micro_steps,
            has_losses=loop.records.has_losses,
            evaluations=self._evaluations(),
            non_finite_steps=tuple(self._first_step + i for i in loop.records.non_finite),
            notes=self._all_notes(loop),
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
            epochs_ended=0 if self._after is None else self._after.epochs_ended,
            device_name=self._device_name,
            first_step=self._first_step,
            micro_batch_size=loop.micro_batch_size,
            accumulate=loop.micro_steps,
            has_losses=loop.records.has_losses,
            evaluations=self._evaluations(),
            non_finite_steps=tuple(self._first_step + i for i in loop.records.non_finite),
            notes=self._all_notes(loop),
        )

    def _all_notes(self, loop: StepLoop) -> tuple[str, ...]:
        of_data = [] if self._data is None else self._data.notes
        return (*self._notes, *of_data, *loop.notes)

    def _evaluations(self) -> tuple[EvaluationRecord, ...]:
        return () if self._after is None else tuple(self._after.evaluations)


@contextmanager
def _explained_for(eval_data: str | None) -> Iterator[None]:
    """Say of data that cannot be evaluated that ``--eval-data`` named them."""
    try:
        yield
    except FsdpError as error:
        if eval_data is None:
            raise
        text = str(error).replace("--data", "--eval-data")
        named = text if "--eval-data" in text else f"--eval-data {eval_data}: {text}"
        raise FsdpError(named) from None


def _mean(samples: list[DeviceSample]) -> DeviceSample:
    def mean(read: Callable[[DeviceSample], float | None]) -> float | None:
        known = [value for sample in samples if (value := read(sample)) is not None]
        return sum(known) / len(known) if known else None

    return DeviceSample(
        utilisation_percent=mean(lambda s: s.utilisation_percent),
        temperature_celsius=mean(lambda s: s.temperature_celsius),
        power_watts=mean(lambda s: s.power_watts),
    )
