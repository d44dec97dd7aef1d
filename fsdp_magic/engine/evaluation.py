"""ENGINE: a cell over data without gradients: every sample once, the same result on every rank.

All ranks run the cell equally often, because its forwards are collective. A rank whose part of
the data is at its end runs on samples that count nothing, and leaves no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.specs import EvalSpec
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.engine import randomness
from fsdp_magic.engine.agreement import WorldAgreement
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.collected import checked_rows
from fsdp_magic.engine.eval_batches import EvalBatch, EvalBatches
from fsdp_magic.engine.eval_mode import average_running_statistics, in_eval_mode
from fsdp_magic.engine.feeding import named_collate, named_sources
from fsdp_magic.engine.guards import Guards, RefusingInEvaluation
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.micro_step import BINDABLE, Bound, CellRunner, scalar_loss
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.records import Averages
from fsdp_magic.engine.schedulers import find_schedulers
from fsdp_magic.engine.track import is_function
from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.weights import Weighing, Weight
from fsdp_magic.engine.world import World

LOSS = "loss"
_ONLY = EvalBatch(batch=None, count=None, start=0)
"""Of a cell that brings its own data: it runs once on each rank, which count alike."""
Rows = list[tuple[int, dict[str, Any]]]


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Runs a cell over data; made once, run as often as is wanted.

    Attributes:
        cell: compiled once.
        spec: which data.
        weighing: what batches count.
        names: of the namespace that the cell runs in.
        world: the ranks.
        models: the sharded models.
        stopping: whether the person has asked to stop.
        rows: what the cell collected on this rank in the last run.
        notes: sentences a person should read.
    """

    cell: Cell
    spec: EvalSpec
    weighing: Weighing
    names: Names
    world: World
    models: Sequence[ShardedModel]
    stopping: Callable[[], bool] = lambda: False
    rows: Rows = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise if the data cannot be read as asked; reads none, and calls no function for it."""
        if self.spec.data is None:
            return
        named_collate(self.spec, self.names.namespace)
        if not is_function(self._source()):
            batches = self._batches()
            assert batches is not None
            batches.close()

    def run(self, *, step: int, epoch: int) -> EvaluationRecord | None:
        """Run the cell over the data.

        Collective: every rank must call this.

        Args:
            step: optimizer steps done.
            epoch: the cell's ``epoch``.

        Returns:
            The result over all ranks; None if the person stopped it.
        """
        namespace = self.names.namespace
        guards = Guards(RefusingInEvaluation(), find_schedulers(namespace).values())
        runner = CellRunner(self.cell, self.names, guards)
        average_running_statistics(self._sharded(), self.world.world_size)
        self.rows, sums = [], _Sums()
        with ExitStack() as stack:
            stack.enter_context(guards.in_place())
            stack.enter_context(torch.no_grad())
            optimizers = reachable(namespace, Optimizer).values()
            stack.enter_context(in_eval_mode(self._modules(), optimizers))
            stack.enter_context(randomness.put_back())
            batches = self._batches()
            if batches is not None:
                stack.callback(batches.close)
            self.names.bind(self._names_of_run(step, epoch, batches))
            for number, batch in enumerate(batches or [_ONLY]):
                if self._stops():
                    return None
                names = {"micro_step": number}
                if batches is not None:
                    names["batch"] = batch.batch
                self._take(runner.run(names), batch, sums)
        for model in self.models:  # a forward leaves the root's parameters gathered
            model.reshard()
        return self._together(sums, step)

    @contextmanager
    def within_training(self) -> Iterator[None]:
        """Keep what the training cell bound, and the names it finds, as they are."""
        namespace = self.names.namespace
        changed = (*BINDABLE, "batch", "step", "micro_step", "epoch", "micro_batch_size")
        kept = {name: namespace[name] for name in changed if name in namespace}
        try:
            yield
        finally:
            for name in changed:
                namespace.pop(name, None)
            self.names.bind({n: v for n, v in kept.items() if n not in BINDABLE})
            namespace.update(kept)

    def _names_of_run(self, step: int, epoch: int, batches: EvalBatches | None) -> dict[str, Any]:
        size = None if batches is None else batches.micro_batch_size
        return {"step": step, "epoch": epoch, "micro_batch_size": size}

    def _stops(self) -> bool:
        """Return whether the person has asked any rank to stop.

        Collective: every rank must call this.
        """
        agreed, _ = self.world.vote.take(Flag.STOP if self.stopping() else Flag.NONE)
        return Flag.STOP in agreed

    def _sharded(self) -> list[nn.Module]:
        return list({id(model.module): model.module for model in self.models}.values())

    def _modules(self) -> list[nn.Module]:
        """Return the sharded models and every other module that names lead to."""
        bound = reachable(self.names.namespace, nn.Module).values()
        together = [*self._sharded(), *bound]
        return list({id(module): module for module in together}.values())

    def _source(self) -> Any:
        sources = named_sources(self.spec, self.names.namespace)
        if len(sources) > 1:
            raise FsdpError(
                f"--data {self.spec.data} names several; an evaluation runs over one: evaluate "
                "them one after the other"
            )
        return sources[0]

    def _batches(self) -> EvalBatches | None:
        """Return the passes over the data; None if the cell brings its own."""
        if self.spec.data is None:
            return None
        with INTERRUPTS.allowed():  # lengths and functions are the person's code
            return EvalBatches(
                self._source(),
                rank=self.world.rank,
                world_size=self.world.world_size,
                device=self.world.device,
                agreement=WorldAgreement(self.world),
                micro_batch_size=self.spec.micro_batch_size,
                collate=named_collate(self.spec, self.names.namespace),
                seed=self.world.request.seed,
            )

    def _take(self, bound: Bound, batch: EvalBatch, sums: _Sums) -> None:
        """Count what a run of the cell bound, unless its batch only keeps others company."""
        if bound.loss is None and not bound.metrics and not bound.collect:
            raise FsdpError(
                "the cell binds none of `loss`, `metrics` and `collect`; end it with a line such "
                'as: metrics = {"accuracy": (prediction == label).float().mean()}'
            )
        if batch.count == 0:
            return
        sums.samples += batch.count or 0
        weight = self._weight(bound, batch)
        if bound.loss is not None:
            loss = scalar_loss(bound.loss).detach()
            sums.loss.add({LOSS: loss if loss.is_cuda else float(loss)}, weight)
        sums.metrics.add(bound.metrics, weight)
        if bound.collect:
            self.rows.append((batch.start, checked_rows(bound.collect, batch.count)))

    def _weight(self, bound: Bound, batch: EvalBatch) -> Weight:
        if bound.weight is not None:
            return bound.weight
        count_labels = self.weighing.count_labels
        labels = None if count_labels is None else count_labels(batch.batch)
        return self.weighing.of_batch(batch.count, labels)

    def _together(self, sums: _Sums, step: int) -> EvaluationRecord:
        """Return the result over all ranks.

        Collective: every rank must call this.
        """
        ranks: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(ranks, (_numbers(sums.loss), _numbers(sums.metrics), sums.samples))
        loss = _added_up([losses for losses, _, _ in ranks]).get(LOSS)
        metrics = _added_up([theirs for _, theirs, _ in ranks])
        return EvaluationRecord(
            step=step,
            loss=None if loss is None else (loss[0] if self.weighing.adds else _mean(*loss)),
            metrics={name: _mean(*both) for name, both in metrics.items()},
            samples=sum(count for _, _, count in ranks),
        )


@dataclass(slots=True)
class _Sums:
    """What is averaged over the batches of an evaluation."""

    loss: Averages = field(default_factory=Averages)
    metrics: Averages = field(default_factory=Averages)
    samples: int = 0


def _numbers(averages: Averages) -> dict[str, tuple[float, float]]:
    return {name: (float(total), float(weight)) for name, (total, weight) in averages.sums.items()}


def _added_up(ranks: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    sums: dict[str, tuple[float, float]] = {}
    for theirs in ranks:
        for name, (total, weight) in theirs.items():
            so_far = sums.get(name, (0.0, 0.0))
            sums[name] = (so_far[0] + total, so_far[1] + weight)
    return sums


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else float("nan")


@contextmanager
def explained_as_evaluated(eval_data: str | None) -> Iterator[None]:
    """Say of data that cannot be evaluated that ``--eval-data`` named them."""
    try:
        yield
    except FsdpError as error:
        if eval_data is None:
            raise
        text = str(error).replace("--data", "--eval-data")
        named = text if "--eval-data" in text else f"--eval-data {eval_data}: {text}"
        raise FsdpError(named) from None


def evaluated_in(
    request: TrainRequest, cell: Cell, evaluation_cell: Cell | None, weighing: Weighing
) -> tuple[Cell, EvalSpec, Weighing]:
    """Return what a training run evaluates: its cell on other data, or the last evaluation cell.

    Args:
        request: of the run.
        cell: that trains.
        evaluation_cell: the last one; None: there is none.
        weighing: of the cell that trains.
    """
    spec = request.spec
    if spec.eval_data is not None:
        asked = EvalSpec(
            data=spec.eval_data, micro_batch_size=spec.micro_batch_size, collate=spec.collate
        )
        return cell, asked, weighing
    assert request.evaluation is not None  # else the kernel has refused it
    assert evaluation_cell is not None
    late = "loss_weight" in evaluation_cell.assigned
    return evaluation_cell, request.evaluation.spec, Weighing("mean", late=late)
