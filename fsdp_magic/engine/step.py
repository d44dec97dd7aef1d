"""ENGINE: a training cell as optimizer steps.

One step: take this step's micro-batches and vote on them; for each, run the cell and take its
``loss`` backward; measure the gradient; vote that all ranks got this far; clip, step, clear.
Weights, optimizer state and data position change only after the second vote, so a cell that
fails anywhere has changed none of them on any rank.

The loss of the global batch is the mean over its samples, so a micro-batch counts by its part
of them: with n_i samples of N, backward runs on ``loss * n_i / N`` and gradients are added up
over micro-steps and ranks. N is known from the first vote. Nothing here waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import gradients
from fsdp_magic.engine.batches import token_count
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.data import Data, StepBatches
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.records import Records
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.trained import Trained
from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.world import World

_UNCOUNTED = "batches have no common number of samples (dim 0 of their tensors); each counts one"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """What each micro-batch of this rank counts, and what all of all ranks count together."""

    counts: list[int]
    total: int


class StepLoop:
    """The steps of one run on one rank.

    Args:
        cell: compiled once.
        names: of the namespace it runs in.
        world: the ranks.
        trained: what it trains.
        data: where batches come from; None: the cell brings its own.
        accumulate: micro-steps per step.
        max_grad_norm: None: no clipping.
        stopping: whether the person has asked this run to stop.
        memory: told where memory is at a height, to measure it there.
    """

    def __init__(
        self,
        cell: Cell,
        names: Names,
        *,
        world: World,
        trained: Trained,
        data: Data | None,
        accumulate: int,
        max_grad_norm: float | None,
        stopping: Callable[[], bool],
        memory: MemoryWatch,
    ) -> None:
        self._cell = cell
        self._names = names
        self._world = world
        self._trained = trained
        self._data = data
        self._accumulate = accumulate
        self._max_grad_norm = max_grad_norm
        self._stopping = stopping
        self._memory = memory
        self.records = Records()
        self.stopped = False
        self.samples_per_step: int | None = None
        self.micro_batch_size: int | None = None
        self.notes: list[str] = []

    def run(self, *, first_step: int, total_steps: int | None) -> None:
        """Take steps until their number is reached, the data ends, or a rank wants to stop.

        Collective: every rank must call this.

        Args:
            first_step: ``step`` of the first one in the cell.
            total_steps: how many; None: to the end of the data.
        """
        for step in itertools.count(first_step):
            # ranks whose data differs in length must still take the same number of steps
            over = total_steps is not None and step == first_step + total_steps
            batches = None if over else self._take()
            weights = self._agree_to_start(batches)
            if weights is None or batches is None:
                self._note_early_end(step - first_step, total_steps)
                return
            self._run_step(step, batches, weights)

    # -- the parts of a step, in order

    def _take(self) -> StepBatches | None:
        if self._data is None:
            return StepBatches(
                batches=[None] * self._accumulate, counts=[1] * self._accumulate, epoch=0
            )
        with INTERRUPTS.allowed():
            return self._data.take()

    def _agree_to_start(self, batches: StepBatches | None) -> _Weights | None:
        """Return what each micro-batch counts; None if not all ranks take the step.

        If any rank's batches have no number of samples, every micro-batch counts one.
        """
        flags = Flag.STOP if self._stopping() else Flag.NONE
        count = 0
        if batches is None:
            flags |= Flag.NO_BATCH
        elif None in batches.counts:
            flags |= Flag.UNCOUNTED
        else:
            count = sum(count for count in batches.counts if count is not None)
        agreed, total = self._world.vote.take(flags, count=count)
        if Flag.STOP in agreed:
            self.stopped = True
        if Flag.STOP in agreed or Flag.NO_BATCH in agreed:
            return None
        if Flag.UNCOUNTED in agreed:
            self._note(_UNCOUNTED)
            ones = [1] * self._accumulate
            return _Weights(counts=ones, total=self._accumulate * self._world.world_size)
        assert batches is not None
        counts = [count for count in batches.counts if count is not None]
        return _Weights(counts=counts, total=total)

    def _run_step(self, step: int, batches: StepBatches, weights: _Weights) -> None:
        self._note_sizes(batches, weights.total)
        self._trained.used.reset()
        share = None
        counted = zip(batches.batches, weights.counts, strict=True)
        for micro_step, (batch, count) in enumerate(counted):
            values = {"step": step, "micro_step": micro_step, "epoch": batches.epoch}
            self._names.bind(values if self._data is None else {**values, "batch": batch})
            loss = self._forward()
            part = loss.detach() * (count / weights.total)
            share = part if share is None else share + part
            self._backward(loss, count / weights.total)
        assert share is not None
        norm = self._measure()
        self._world.vote.take()  # from here on no rank can fail but in its own optimizer
        self._update(norm)
        tokens = [token_count(batch) for batch in batches.batches]
        self.records.add(
            loss=share,
            grad_norm=norm,
            samples=sum(count or 0 for count in batches.counts) if self._data else 0,
            tokens=None if None in tokens else sum(t for t in tokens if t is not None),
        )

    def _forward(self) -> torch.Tensor:
        """Run the cell, and return the loss that it bound."""
        namespace = self._names.namespace
        namespace.pop("loss", None)
        with INTERRUPTS.allowed():
            self._cell.run(namespace)
        self._memory.mark()
        loss = _checked_loss(namespace)
        namespace["loss"] = loss.detach()
        return loss

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        with INTERRUPTS.allowed():
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        self._memory.mark_gradients()

    def _measure(self) -> torch.Tensor:
        with INTERRUPTS.allowed():
            self._trained.used.settle()
            gradients.reduce_whole(self._trained.whole)
            return gradients.total_norm(self._trained.parameters, world_size=self._world.world_size)

    def _update(self, norm: torch.Tensor) -> None:
        """Clip, step and clear; an error in here leaves this rank's weights half updated."""
        try:
            if self._max_grad_norm is not None:
                gradients.clip(self._trained.parameters, norm, self._max_grad_norm)
            for optimizer in self._trained.optimizers.values():
                optimizer.step()
        except Exception as error:
            error.add_note(
                "The error came out of the optimizer step itself: some weights of this step may "
                "be updated and others not. Build the model again, or load a checkpoint."
            )
            raise
        self._memory.count_optimizer_state()
        self._memory.mark()
        gradients.clear(self._trained.parameters)
        self._memory.step_over()
        if self._data is not None:
            self._data.commit()

    # -- sizes

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _note_early_end(self, steps: int, total_steps: int | None) -> None:
        """Say so if data ended before the steps that were asked for."""
        if total_steps is not None and steps < total_steps and not self.stopped:
            self._note(f"the data ended after {steps} of {total_steps} steps")

    def _note_sizes(self, batches: StepBatches, total: int) -> None:
        if self._data is not None and self.samples_per_step is None:
            self.samples_per_step = total
            self.micro_batch_size = batches.counts[0]


@contextmanager
def cleared_after_failure(trained: Trained) -> Iterator[None]:
    """Drop every gradient if the inside fails, so that the next step begins without any."""
    try:
        yield
    except BaseException:
        gradients.clear(trained.parameters)
        raise


def _checked_loss(namespace: dict[str, Any]) -> torch.Tensor:
    """Return the loss that a cell bound.

    Raises:
        FsdpError: if it bound none, or something that has no backward.
    """
    loss = namespace.get("loss")
    if loss is None:
        raise FsdpError("the cell binds no `loss`; end it with a line such as: loss = model(batch)")
    if not isinstance(loss, torch.Tensor):
        raise FsdpError(f"`loss` is a {type(loss).__name__}; it must be a tensor of one element")
    if isinstance(loss, DTensor):
        raise FsdpError(
            "`loss` is made of sharded parameters directly, which adds up each rank's part only; "
            "put such a term into the model's forward"
        )
    if loss.numel() != 1:
        raise FsdpError(
            f"`loss` has shape {tuple(loss.shape)}; it must have one element: loss = loss.mean()"
        )
    if not loss.requires_grad:
        raise FsdpError(
            "`loss` does not require grad, so there is nothing to train; compute it outside "
            "torch.no_grad() and without .detach() or .item()"
        )
    return loss.reshape(())
