"""ENGINE: a cell over data without gradients: every sample once, the same result on every rank.

All ranks run the cell equally often, because its forwards are collective. A rank whose part of
the data is at its end runs on samples that count nothing, and leaves no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import EvalSpec
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.engine import randomness
from fsdp_magic.engine.agreement import WorldAgreement
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.eval_batches import EvalBatch, EvalBatches
from fsdp_magic.engine.feeding import named_collate, named_sources
from fsdp_magic.engine.guards import Guards
from fsdp_magic.engine.micro_step import BINDABLE, Bound, CellRunner, scalar_loss
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.parallel.fsdp import ShardedModel
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.records import Averages
from fsdp_magic.engine.weights import Weighing, Weight, label_counter
from fsdp_magic.engine.world import World

LOSS = "loss"
_ONLY = EvalBatch(batch=None, count=1, start=0)
"""Of a cell that brings its own data: it runs once on each rank."""
Rows = list[tuple[int, dict[str, Any]]]


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Runs a cell over data; made once, run as often as is wanted.

    Attributes:
        cell: compiled once.
        spec: which data.
        weighing: what batches count.
        names: of the namespace that the cell runs in.
        guards: hand calls of the cell to whoever watches.
        world: the ranks.
        models: the sharded models.
        rows: what the cell collected on this rank in the last run.
        notes: sentences a person should read.
    """

    cell: Cell
    spec: EvalSpec
    weighing: Weighing
    names: Names
    guards: Guards
    world: World
    models: Sequence[ShardedModel]
    rows: Rows = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, *, step: int, epoch: int = 0) -> EvaluationRecord:
        """Run the cell over the data.

        Collective: every rank must call this.

        Args:
            step: optimizer steps done.
            epoch: the cell's ``epoch``.

        Returns:
            The result over all ranks.
        """
        modules = self._modules()
        average_running_statistics(modules, self.world.world_size)
        self.rows, sums = [], _Sums()
        runner = CellRunner(self.cell, self.names, self.guards)
        with ExitStack() as stack:
            batches = self._batches()
            if batches is not None:
                stack.callback(batches.close)
            stack.enter_context(torch.no_grad())
            stack.enter_context(in_eval_mode(modules))
            stack.enter_context(randomness.put_back())
            stack.enter_context(self._bindable_kept())
            for number, batch in enumerate(batches or [_ONLY]):
                names = {"step": step, "micro_step": number, "epoch": epoch}
                with_batch = {**names, "batch": batch.batch}
                bound = runner.run(names if batches is None else with_batch)
                self._take(bound, batch, sums)
        return self._together(sums, step)

    def _modules(self) -> list[nn.Module]:
        """Return the sharded models and every other module that names lead to."""
        bound = reachable(self.names.namespace, nn.Module).values()
        together = [*(model.module for model in self.models), *bound]
        return list({id(module): module for module in together}.values())

    def _batches(self) -> EvalBatches | None:
        """Return the passes over the data; None if the cell brings its own."""
        namespace = self.names.namespace
        if self.spec.data is None:
            return None
        sources = named_sources(self.spec, namespace)
        if len(sources) > 1:
            raise FsdpError(
                f"--data {self.spec.data} names several; an evaluation runs over one: evaluate "
                "them one after the other"
            )
        return EvalBatches(
            sources[0],
            rank=self.world.rank,
            world_size=self.world.world_size,
            device=self.world.device,
            agreement=WorldAgreement(self.world),
            micro_batch_size=self.spec.micro_batch_size,
            collate=named_collate(self.spec, namespace),
            seed=self.world.request.seed,
        )

    @contextmanager
    def _bindable_kept(self) -> Iterator[None]:
        """Keep what a training cell bound, which an evaluation in between would clear."""
        namespace = self.names.namespace
        kept = {name: namespace[name] for name in BINDABLE if name in namespace}
        try:
            yield
        finally:
            if kept:
                namespace.update(kept)

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
            self.rows.append((batch.start, _checked_rows(bound.collect, batch.count)))

    def _weight(self, bound: Bound, batch: EvalBatch) -> Weight:
        if bound.weight is not None:
            return bound.weight
        count_labels = label_counter(self.weighing, self.models)
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


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules in eval mode inside, and each of them as it was afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def average_running_statistics(modules: Iterable[nn.Module], world_size: int) -> None:
    """Average what BatchNorm layers have gathered on each rank.

    Collective: every rank must call this.
    """
    for module in modules:
        for part in module.modules():
            if not isinstance(part, _BatchNorm):
                continue
            for statistic in (part.running_mean, part.running_var):
                if statistic is not None:
                    dist.all_reduce(statistic)
                    statistic /= world_size


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


def _checked_rows(collect: dict[str, Any], count: int | None) -> dict[str, Any]:
    """Return rows as arrays and lists that can be sent, one row per sample.

    Raises:
        FsdpError: if there are more or fewer rows than samples.
    """
    rows = {str(name): _rows(value) for name, value in collect.items()}
    for name, value in rows.items():
        if not hasattr(value, "__len__") or (count is not None and len(value) != count):
            length = f"{len(value)} rows" if hasattr(value, "__len__") else "no rows"
            raise FsdpError(
                f"collect[{name!r}] has {length} and the batch {count} samples; it takes one row "
                "per sample"
            )
    return rows


def _rows(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return list(value) if hasattr(value, "__iter__") else value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    value = value.detach().cpu()
    if value.dtype is torch.bfloat16:  # numpy has none
        value = value.float()
    return value.numpy() if value.ndim else value.item()
