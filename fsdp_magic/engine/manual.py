"""ENGINE: a manual step: the cell is one whole step, run as it is written.

Backward, accumulation, clipping, optimizers and schedulers are the cell's. What is left to do
happens at its calls: after ``backward()`` gradients that every rank holds whole are averaged, as
FSDP2 averages those of shards; ``zero_grad()`` of a module reaches the
shards; before an optimizer's ``step()`` its gradient is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp_magic.core.telemetry import SkippedSteps
from fsdp_magic.engine import gradients
from fsdp_magic.engine.batches import token_count
from fsdp_magic.engine.data import StepBatches
from fsdp_magic.engine.likeness import refuse_unlike_steps
from fsdp_magic.engine.micro_step import CellRunner, scalar_loss
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.parallel import gathering
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.zero1 import gather_written
from fsdp_magic.engine.records import Averages, StepResult
from fsdp_magic.engine.step import names_of, weighted
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.trained import Trained
from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.weights import Weights
from fsdp_magic.engine.world import World


class ManualStep:
    """The steps of a cell that does everything itself, and the watcher of its calls.

    Args:
        world: the ranks.
        trained: what the bound optimizers hold.
        models: the sharded models.
        memory: told where memory is at a height.
        has_data: whether ``batch`` is bound.

    Attributes:
        runner: runs the cell; set once the guards that watch it are there.
        stepped: the optimizers that the last step stepped.
        skipped: None: the scaler is the cell's.
    """

    runner: CellRunner

    def __init__(
        self,
        *,
        world: World,
        trained: Trained,
        models: Sequence[ShardedModel],
        memory: MemoryWatch,
        has_data: bool,
    ) -> None:
        self._world = world
        self._trained = trained
        self._models = models
        self._memory = memory
        self._has_data = has_data
        self._squares: dict[int, torch.Tensor] = {}
        self.skipped: SkippedSteps | None = None
        self.stepped: list[Optimizer] = []

    def take(self, step: int, batches: StepBatches, weights: Weights) -> StepResult:
        """Run the cell once.

        Collective: every rank must call this.
        """
        self._squares.clear()
        self.stepped = []
        batch = batches.batches[0]
        with STEPS.within_step():
            bound = self.runner.run(names_of(step, 0, batches, batch, self._has_data))
            refuse_unlike_steps(self._trained.optimizers, self._world)
        gather_written(self._models)
        self._memory.count_optimizer_state()
        self._memory.step_over()
        loss = None if bound.loss is None else scalar_loss(bound.loss).detach()
        metrics = Averages()
        metrics.add(bound.metrics, weights.counts[0])
        return StepResult(
            loss=None if loss is None else weighted(loss, weights.factor(0)),
            grad_norm=self._norm(),
            metrics=metrics,
            samples=(batches.counts[0] or 0) if self._has_data else 0,
            tokens=token_count(batch),
        )

    # -- the watcher

    def backward(self, call: Callable[[], Any]) -> Any:
        """Go backward, and make the gradient that of all ranks.

        Collective: every rank must call this.
        """
        self._memory.mark()
        kept = [p for p in self._trained.parameters if p.grad is not None]
        self._trained.used.reset()
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.reducing(is_last=True))
            result = call()
        flags = Flag.MISSING if self._trained.used.some_missing else Flag.NONE
        agreed, _ = self._world.vote.take(flags)
        if Flag.MISSING in agreed:
            self._trained.used.settle(keep=kept)
        for model in self._models:
            model.reduce()
        self._average_whole()
        self._memory.mark_gradients()
        return result

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Measure the gradient that an optimizer is about to use."""
        self._squares[id(optimizer)] = gradients.square_of(
            parameters_of(optimizer), world_size=self._world.world_size
        )
        if optimizer not in self.stepped:
            self.stepped.append(optimizer)

    def closure(self, call: Callable[[], Any]) -> Any:
        """Return the loss of a closure as that of all ranks, which must decide alike by it.

        Collective: every rank must call this.
        """
        loss = call()
        if not isinstance(loss, torch.Tensor):
            return loss
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / self._world.world_size

    def zero_grad(self, owner: nn.Module | Optimizer, call: Callable[[], Any]) -> Any:
        """Clear the gradients of the shards too, which a module does not show after a forward."""
        result = call()
        if isinstance(owner, nn.Module):
            gathering.clear_gradients(owner)
        return result

    def scheduler_step(self, call: Callable[[], Any]) -> Any:
        """Let it step."""
        return call()

    def _average_whole(self) -> None:
        """Average over the ranks what the last backward added to the gradients of whole tensors.

        Earlier backwards left the same on every rank, and the mean of that is that.
        """
        gradients.reduce_whole(self._trained.whole)
        for parameter in self._trained.whole:
            if parameter.grad is not None:
                parameter.grad /= self._world.world_size

    def _norm(self) -> torch.Tensor | None:
        """Return the norm of what the optimizers used in their last steps.

        Collective: every rank must call this.
        """
        if not self._squares:
            return None
        square = torch.stack([s.double() for s in self._squares.values()]).sum()
        dist.all_reduce(square)
        return square.sqrt()
