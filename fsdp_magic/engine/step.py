"""ENGINE: an automatic step: the cell run once per micro-batch, and everything around it.

One step: for each micro-batch, run the cell and take its ``loss`` backward; vote that all ranks
got this far; settle what the gradient is, measure and clip it; vote again; step, clear. Weights
and data position change only after the last vote, so a cell that fails anywhere but inside an
optimizer has changed none of them on any rank. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.optim import Optimizer

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.telemetry import SkippedSteps
from fsdp_magic.engine import gradients, optimizer_state
from fsdp_magic.engine.batches import token_count
from fsdp_magic.engine.data import StepBatches
from fsdp_magic.engine.grad_scaler import NoScaling, Scaling
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.micro_step import Bound, CellRunner, checked_loss
from fsdp_magic.engine.optimizers import with_gradients
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.records import Averages, StepResult
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.trained import Trained
from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.weights import Weight, Weights
from fsdp_magic.engine.world import World


class Step(Protocol):
    """How one step is taken."""

    stepped: list[Optimizer]
    """The optimizers that the last step stepped."""

    @property
    def skipped(self) -> SkippedSteps | None:
        """Steps that the fp16 scaler skipped; None: none. For any thread."""

    def take(self, step: int, batches: StepBatches, weights: Weights) -> StepResult:
        """Take a step.

        Collective: every rank must call this.
        """


@dataclass(slots=True, kw_only=True)
class AutomaticStep:
    """The steps of a cell that binds ``loss``.

    Attributes:
        runner: runs the cell.
        world: the ranks.
        trained: what is trained.
        models: the sharded models.
        memory: told where memory is at a height, to measure it there.
        max_grad_norm: None: no clipping.
        stops_at_nan: whether a loss that is not finite ends the run before its step.
        has_data: whether ``batch`` is bound.
        scaling: of the loss, for fp16.
    """

    runner: CellRunner
    world: World
    trained: Trained
    models: list[ShardedModel]
    memory: MemoryWatch
    max_grad_norm: float | None
    stops_at_nan: bool
    has_data: bool
    scaling: Scaling = field(default_factory=NoScaling)
    stepped: list[Optimizer] = field(default_factory=list)

    @property
    def skipped(self) -> SkippedSteps | None:
        """Steps that the fp16 scaler skipped; None: none."""
        return self.scaling.skipped

    def take(self, step: int, batches: StepBatches, weights: Weights) -> StepResult:
        """Take a step.

        Collective: every rank must call this.
        """
        self.trained.used.reset()
        loss, metrics, weight = self._micro_steps(step, batches, weights)
        norm, total = self._settle(step, loss, weight if weights.total is None else None)
        if total is not None:
            gradients.scale(self.trained.parameters, _inverse(total))
            loss = loss * _inverse(total).to(loss.dtype)
        if self.max_grad_norm is not None:
            gradients.clip(self.trained.parameters, norm, self.max_grad_norm)
        skips = self.scaling.skips(norm)
        self.stepped = [] if skips else with_gradients(self.trained.optimizers.values())
        optimizer_state.make_missing(self.stepped)
        self.memory.count_optimizer_state()  # before anybody looks at the height of the update
        self.world.vote.take()  # from here on no rank can fail but in its own optimizer
        self._update()
        self.scaling.update(norm)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            metrics=metrics,
            samples=sum(count or 0 for count in batches.counts) if self.has_data else 0,
            tokens=_tokens(batches),
        )

    def _micro_steps(
        self, step: int, batches: StepBatches, weights: Weights
    ) -> tuple[torch.Tensor, Averages, Weight]:
        """Run the cell and backward for each micro-batch.

        Returns:
            This rank's share of the loss (with late weights: of its numerator), its metrics, and
            the sum of its weights.
        """
        share: torch.Tensor | None = None
        metrics = Averages()
        total: Weight = 0.0
        for micro_step, batch in enumerate(batches.batches):
            bound = self.runner.run(names_of(step, micro_step, batches, batch, self.has_data))
            self.memory.mark()
            loss = checked_loss(bound.loss, assigned=self.runner.cell.assigned)
            weight = _weight(bound, weights, micro_step)
            part = weighted(loss.detach(), weight)
            share = part if share is None else share + part
            counted = bound.weight if bound.weight is not None else weights.counts[micro_step]
            metrics.add(bound.metrics, counted)
            total = total + weight
            with ExitStack() as stack:
                for model in self.models:
                    is_last = micro_step == len(batches.batches) - 1
                    stack.enter_context(model.reducing(is_last=is_last))
                self._backward(loss, weight)
        assert share is not None
        return share, metrics, total

    def _backward(self, loss: torch.Tensor, weight: Weight) -> None:
        with INTERRUPTS.allowed(), gradients.without_the_uncounted(self._leaves(), weight):
            self.scaling.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
        self.memory.mark_gradients()

    def _leaves(self) -> Iterator[torch.Tensor]:
        """Yield the tensors at which gradients arrive in a backward."""
        for model in self.models:
            yield from model.leaves()
        yield from (p for p in self.trained.whole if p.requires_grad)

    def _settle(
        self, step: int, loss: torch.Tensor, weight: Weight | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Agree on what the gradient is, and return its norm and the sum of late weights."""
        flags = Flag.MISSING if self.trained.used.some_missing else Flag.NONE
        if self.stops_at_nan and not bool(torch.isfinite(loss)):
            flags |= Flag.NOT_FINITE
        agreed, _ = self.world.vote.take(flags)
        if Flag.NOT_FINITE in agreed:
            raise FsdpError(
                f"the loss of step {step:,} is not finite (--nan stop); the weights are those "
                "before the step"
            )
        with INTERRUPTS.allowed():
            if Flag.MISSING in agreed and not self.trained.used.settle():
                raise _nothing_trained(self.trained)
            for model in self.models:
                model.reduce()
            gradients.reduce_whole(self.trained.whole)
            self.scaling.unscale(self.trained.parameters)
            return gradients.measure(
                self.trained.parameters, world_size=self.world.world_size, weight=weight
            )

    def _update(self) -> None:
        """Step and clear; an error in here leaves this rank's weights half updated."""
        for optimizer in self.stepped:
            optimizer.step()
        for model in self.models:
            model.updated()
        self.memory.count_optimizer_state()
        self.memory.mark()
        gradients.clear(self.trained.parameters)
        self.memory.step_over()


def names_of(
    step: int, micro_step: int, batches: StepBatches, batch: object, has_data: bool
) -> dict[str, object]:
    """Return the names that change from micro-step to micro-step."""
    names: dict[str, object] = {"step": step, "micro_step": micro_step, "epoch": batches.epoch}
    return {**names, "batch": batch} if has_data else names


def weighted(value: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return a value times its weight; zero where the weight is, whatever the value."""
    if isinstance(weight, torch.Tensor):
        weight = weight.to(value)
        return torch.where(weight == 0, torch.zeros_like(value), value * weight)
    return value * weight if weight else torch.zeros_like(value)


@contextmanager
def cleared_after_failure(trained: Trained) -> Iterator[None]:
    """Drop every gradient if the inside fails, so that the next step begins without any."""
    try:
        yield
    except BaseException:
        gradients.clear(trained.parameters)
        raise


def _weight(bound: Bound, weights: Weights, micro_step: int) -> Weight:
    """Return what backward multiplies a micro-batch's loss by."""
    if weights.total is None:
        return bound.weight if bound.weight is not None else weights.factor(micro_step)
    if bound.weight is not None:
        raise FsdpError(
            "`loss_weight` was bound out of sight (in a function, say); bind it in the cell "
            "itself: loss_weight = ..."
        )
    return weights.factor(micro_step)


def _nothing_trained(trained: Trained) -> FsdpError:
    names = ", ".join(f"`{name}`" for name in trained.optimizers)
    return FsdpError(
        f"no parameter of {names} takes part in `loss`, so no step would change anything; make an "
        "optimizer of the parameters that do, in %%fsdp_model"
    )


def _inverse(total: torch.Tensor) -> torch.Tensor:
    """Return 1 / total; 0 where nothing was counted, so that the gradient is zero."""
    return torch.where(total == 0, torch.zeros_like(total), 1 / total)


def _tokens(batches: StepBatches) -> int | None:
    counts = [token_count(batch) for batch in batches.batches]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
