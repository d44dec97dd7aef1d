"""ENGINE: what a training run needs before its first step: models, data, steps, their aftermath."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.engine import modeling, telemetry
from fsdp_magic.engine.aftermath import AfterStep, AfterSteps
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.data import Data
from fsdp_magic.engine.evaluation import Evaluator, evaluated_in, explained_as_evaluated
from fsdp_magic.engine.expressions import evaluate
from fsdp_magic.engine.feeding import length, names_of, open_data
from fsdp_magic.engine.fsdp_in_cells import FsdpInCells
from fsdp_magic.engine.grad_scaler import Scaling, scaling_of
from fsdp_magic.engine.guards import Guards, Refusing
from fsdp_magic.engine.likeness import refuse_unlike
from fsdp_magic.engine.loop import StepLoop
from fsdp_magic.engine.manual import ManualStep
from fsdp_magic.engine.micro_step import CellRunner
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.prepared import Prepared
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.rollback import Snapshot, StepUndo
from fsdp_magic.engine.schedulers import Schedulers, find_schedulers, schedulers_of
from fsdp_magic.engine.snapshots import RunSnapshots
from fsdp_magic.engine.state import State
from fsdp_magic.engine.step import AutomaticStep, Step
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.trained import (
    Trained,
    find_trained,
    put_in_train_mode,
    take_whole_from_rank_0,
)
from fsdp_magic.engine.weights import Weighing, weighing_of
from fsdp_magic.engine.world import World


class Preparation:
    """Prepares one run on one rank.

    Args:
        request: what was asked.
        world: this rank's.
        names: of the namespace that the cell runs in.
        handle: the ``fsdp`` of the cell.
        put_back: told how to put back what a trial changes.

    Attributes:
        notes: sentences a person should read.
    """

    def __init__(
        self,
        request: TrainRequest,
        *,
        world: World,
        names: Names,
        handle: FsdpInCells,
        put_back: ExitStack,
    ) -> None:
        self.notes: list[str] = []
        self._request = request
        self._world = world
        self._names = names
        self._namespace = names.namespace
        self._handle = handle
        self._put_back = put_back
        self._models: list[ShardedModel] = []
        self._loop: StepLoop | None = None
        self._evaluation_cell: Cell | None = None
        self._first_step = 0
        self._total_steps: int | None = None

    def prepare(
        self,
        cell: Cell,
        *,
        evaluation_cell: Cell | None,
        kept: State,
    ) -> Prepared:
        """Find what is trained and where the data is; shard what never was.

        Collective: every rank must call this.
        """
        self._evaluation_cell = evaluation_cell
        self._first_step = kept.steps
        spec, world = self._request.spec, self._world
        trained = self._find_trained(kept)
        weighing = weighing_of(cell, trained.parameters, self._models, spec)
        data = open_data(
            spec,
            self._namespace,
            world=world,
            position=kept.position,
            count_labels=weighing.count_labels,
        )
        self._total_steps = self._request.steps_left or length(spec, data)
        telemetry.reset_peak()
        memory = MemoryWatch(self._stored(trained), list(trained.optimizers.values()))
        self._bind_sizes(data)
        scaling = scaling_of(self._models, trained.parameters, kept.scaler, world.device)
        step, guards = self._step(cell, trained, memory, scaling, has_data=data is not None)
        after = self._aftermath(cell, step, data, trained, weighing)
        snapshots = self._snapshots(kept, data, after)
        self._loop = StepLoop(
            step=step,
            world=world,
            data=data,
            weighing=weighing,
            micro_steps=spec.accumulate if data is None else data.accumulate,
            handle=self._handle,
            stopping=self._stopping,
            aftermath=after,
            undo=StepUndo(self._modules()),
            snapshots=snapshots,
        )
        return Prepared(
            models=self._models,
            trained=trained,
            data=data,
            memory=memory,
            guards=guards,
            loop=self._loop,
            after=after,
            snapshots=snapshots,
            total_steps=self._total_steps,
        )

    def _find_trained(self, kept: State) -> Trained:
        """Find what is trained, the same on every rank, as it is to be when the run begins.

        Collective: every rank must call this.
        """
        world, models = self._world, kept.models
        self.notes += modeling.shard_forgotten(self._namespace, models=models, world=world)
        self._models = [model for model in models.values() if model.alive]
        trained, notes = find_trained(
            self._namespace, self._models, manual=self._request.spec.manual
        )
        refuse_unlike(trained, self._models, world)
        self.notes += take_whole_from_rank_0(trained, world)
        self.notes += kept.restoration.complete()
        STEPS.train(trained.optimizers.values())
        if self._request.spec.trial:
            self._undo_afterwards(kept, trained)
        self.notes += notes + put_in_train_mode(self._models, trained)
        return trained

    def _bind_sizes(self, data: Data | None) -> None:
        """Bind the names that tell a cell how long it runs, and on how much at once."""
        size = None if data is None else data.micro_batch_size
        end = None if self._total_steps is None else self._first_step + self._total_steps
        self._names.bind({"total_steps": end, "micro_batch_size": size})

    def _undo_afterwards(self, kept: State, trained: Trained) -> None:
        """Have everything that a trial changes put back when the run is over."""
        self._put_back.callback(kept.position.back, kept.position.mark())
        schedulers = reachable(self._namespace, LRScheduler).values()
        optimizers = trained.optimizers.values()
        before = Snapshot(self._modules(), trained.parameters, optimizers, schedulers)
        self._put_back.callback(before.restore)
        self._put_back.callback(kept.scaler.load_state_dict, kept.scaler.state_dict())

    def _snapshots(self, kept: State, data: Data | None, after: AfterSteps) -> RunSnapshots | None:
        """Return what makes the snapshots of the run; None: nobody asked for any.

        Collective: every rank must call this.
        """
        spec = self._request.spec
        if spec.snapshot_every is None:
            return None
        kept.snapshots.prepare()
        tracks = [] if data is None else data.tracks
        return RunSnapshots(
            kept.snapshots,
            every=spec.snapshot_every,
            run_id=self._request.run_id,
            data=dict(zip(names_of(spec), tracks, strict=True)),
            epoch=kept.epoch,
            epochs_ended=lambda: after.epochs_ended,
        )

    def _stored(self, trained: Trained) -> list[torch.Tensor]:
        """Return the parameters that take memory: of models, and trained ones of no model."""
        held = {id(p) for model in self._models for p in model.named_parameters().values()}
        of_none = [p for p in trained.parameters if id(p) not in held]
        return of_none + [p for model in self._models for p in model.module.parameters()]

    def _modules(self) -> list[nn.Module]:
        """Return the sharded models and every other module that names lead to."""
        bound = reachable(self._namespace, nn.Module).values()
        return [*(model.module for model in self._models), *bound]

    def _step(
        self, cell: Cell, trained: Trained, memory: MemoryWatch, scaling: Scaling, *, has_data: bool
    ) -> tuple[Step, Guards]:
        """Return how a step is taken, and the guards that watch the cell."""
        spec = self._request.spec
        schedulers = find_schedulers(self._namespace).values()
        if spec.manual:
            manual = ManualStep(
                world=self._world, trained=trained, models=self._models, memory=memory,
                has_data=has_data,
            )  # fmt: skip
            guards = Guards(manual, schedulers)
            manual.runner = CellRunner(cell, self._names, guards)
            return manual, guards
        guards = Guards(Refusing(), schedulers)
        automatic = AutomaticStep(
            runner=CellRunner(cell, self._names, guards),
            world=self._world,
            trained=trained,
            models=self._models,
            memory=memory,
            max_grad_norm=spec.max_grad_norm,
            stops_at_nan=spec.nan == "stop",
            has_data=has_data,
            scaling=scaling,
        )
        return automatic, guards

    def _aftermath(
        self, cell: Cell, step: Step, data: Data | None, trained: Trained, weighing: Weighing
    ) -> AfterSteps:
        spec = self._request.spec
        moves_schedulers = self._request.moves_schedulers and not spec.manual
        function = None
        if spec.after_step is not None:
            value = evaluate(spec.after_step, self._namespace, flag="--after-step")
            function = AfterStep(value, world_size=self._world.world_size)
        return AfterSteps(
            step=step,
            schedulers=self._schedulers(data, trained) if moves_schedulers else None,
            function=function,
            evaluate=self._evaluation(cell, weighing),
            every=spec.eval_every,
        )

    def _evaluation(
        self, cell: Cell, weighing: Weighing
    ) -> Callable[[int], EvaluationRecord | None] | None:
        """Return what evaluates after so many steps; None: nothing was asked for."""
        spec = self._request.spec
        if spec.eval_every is None:
            return None
        cell, asked, weighing = evaluated_in(self._request, cell, self._evaluation_cell, weighing)
        evaluator = Evaluator(
            cell=cell,
            spec=asked,
            weighing=weighing,
            names=self._names,
            world=self._world,
            models=self._models,
            stopping=self._stopping,
        )
        with explained_as_evaluated(spec.eval_data):
            evaluator.check()

        def evaluated(step: int) -> EvaluationRecord | None:
            with evaluator.within_training():
                return evaluator.run(step=step, epoch=self._epoch)

        return evaluated

    def _stopping(self) -> bool:
        """Whether the person has asked this run to stop."""
        return self._world.page.stopping_run == self._request.run_id

    def _schedulers(self, data: Data | None, trained: Trained) -> Schedulers:
        schedulers = schedulers_of(
            self._namespace,
            trained.optimizers.values(),
            self._request.spec,
            first_step=self._first_step,
            steps=self._total_steps,
            steps_per_epoch=None if data is None else data.steps_per_epoch,
        )
        self.notes += schedulers.notes
        return schedulers

    @property
    def _epoch(self) -> int:
        return 0 if self._loop is None else self._loop.epoch
