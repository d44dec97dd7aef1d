"""ENGINE: learning rate schedulers: found by type, stepped with the optimizer they belong to.

Most count optimizer steps. Some are as often meant per epoch, and nothing in them tells; those
must be told apart by the person, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs.train import SchedulerEvery, TrainSpec
from fsdp_magic.engine.reachable import reachable

_AMBIGUOUS = (StepLR, MultiStepLR, ExponentialLR)
_HORIZONS = ("T_max", "total_steps", "total_iters")
_HORIZON_OF_LAMBDA = "num_training_steps"
"""Where schedulers keep after how many steps they end: torch's as attributes, transformers' as
an argument of the function that a ``LambdaLR`` calls."""


def find_schedulers(namespace: Mapping[str, Any]) -> dict[str, LRScheduler]:
    """Return the schedulers that names lead to, but those that are part of another one."""
    found = reachable(namespace, LRScheduler)
    parts = {id(part) for scheduler in found.values() for part in _parts(scheduler)}
    return {name: each for name, each in found.items() if id(each) not in parts}


class Schedulers:
    """The schedulers of a run.

    Args:
        found: by name.
        optimizers: those that the run steps; a scheduler of another one is left alone.
        every: as asked; None: after each optimizer step.

    Attributes:
        notes: sentences a person should read.

    Raises:
        FsdpError: if a scheduler may count steps or epochs and nothing was asked.
    """

    def __init__(
        self,
        found: Mapping[str, LRScheduler],
        optimizers: Iterable[Optimizer],
        *,
        every: SchedulerEvery | None,
    ) -> None:
        stepped = {id(optimizer) for optimizer in optimizers}
        mine = {n: s for n, s in found.items() if id(s.optimizer) in stepped}
        if every is None:
            _refuse_ambiguous(mine)
        self._every: SchedulerEvery = every or "step"
        self._counting = {n: s for n, s in mine.items() if not _waits_for_evaluation(s)}
        self._waiting = {n: s for n, s in mine.items() if _waits_for_evaluation(s)}
        self.notes: list[str] = []

    def check(self, *, first_step: int, steps: int | None, epochs: float | None) -> None:
        """Note horizons unlike the run's.

        Args:
            first_step: of the run.
            steps: it will take; None: not known.
            epochs: likewise.

        Raises:
            FsdpError: if a scheduler would raise halfway.
        """
        run = steps if self._every == "step" else epochs
        for name, scheduler in self._counting.items():
            horizon = _horizon(scheduler)
            if horizon is None or run is None:
                continue
            done = int(scheduler.last_epoch)
            if _refuses_more(scheduler) and done + run > horizon:
                after = f" after {done}" if done else ""
                raise FsdpError(
                    f"{name} ends after {horizon} {self._every}s and refuses more; this run takes "
                    f"{run:g}{after}: take fewer, or make it for {done + run:g} (total_steps="
                    f"{_total_of_last(scheduler) + math.ceil(done + run) - horizon})"
                )
            if self._every == "epoch" and first_step:
                continue  # its epochs before this run are not known
            if done + run != horizon:
                self.notes.append(self._about_horizon(name, horizon, ends_at=done + run))

    def _about_horizon(self, name: str, horizon: int, *, ends_at: float) -> str:
        unit = self._every
        if ends_at < horizon:
            then = f"this run ends at {unit} {ends_at:g}, before it is through"
        else:
            then = (
                f"this run goes on to {unit} {ends_at:g}, where its learning rate follows no plan "
                "(a cosine rises again): make a new one, or take fewer"
            )
        return f"{name} is made for {horizon} {unit}s; {then}"

    def check_waiting(self, *, evaluates: bool) -> None:
        """Note which schedulers are never stepped because the run evaluates nothing.

        Raises:
            FsdpError: if one waits for something other than a loss.
        """
        if self._waiting and not evaluates:
            self.notes.append(
                f"{', '.join(self._waiting)} steps after an evaluation; add --eval-every N"
            )
            return
        for name, scheduler in self._waiting.items():
            if getattr(scheduler, "mode", "min") == "max":
                raise FsdpError(
                    f"{name} has mode='max', and it is stepped with the loss of each evaluation, "
                    "which falls; make it with mode='min'"
                )

    def after_step(self, stepped: Iterable[Optimizer]) -> None:
        """Step those that count optimizer steps, of the optimizers that have just stepped."""
        if self._every == "step":
            ids = {id(optimizer) for optimizer in stepped}
            for scheduler in self._counting.values():
                if id(scheduler.optimizer) in ids:
                    scheduler.step()

    def after_epoch(self) -> None:
        """Step those that count epochs."""
        if self._every == "epoch":
            for scheduler in self._counting.values():
                scheduler.step()

    def after_evaluation(self, loss: float) -> None:
        """Step those that wait for a loss."""
        for scheduler in self._waiting.values():
            scheduler.step(loss)  # type: ignore[arg-type]  # a plateau's step takes a metric


def schedulers_of(
    namespace: Mapping[str, Any],
    optimizers: Iterable[Optimizer],
    spec: TrainSpec,
    *,
    first_step: int,
    steps: int | None,
    steps_per_epoch: int | None,
) -> Schedulers:
    """Return the schedulers of a run, checked against its length.

    Args:
        namespace: whose names lead to them.
        optimizers: those that the run steps.
        spec: its options.
        first_step: of the run.
        steps: it will take; None: not known.
        steps_per_epoch: None: not known.

    Raises:
        FsdpError: if one cannot be stepped as asked.
    """
    schedulers = Schedulers(find_schedulers(namespace), optimizers, every=spec.scheduler_every)
    epochs = None if steps is None or not steps_per_epoch else steps / steps_per_epoch
    schedulers.check(first_step=first_step, steps=steps, epochs=epochs)
    schedulers.check_waiting(evaluates=spec.eval_every is not None)
    return schedulers


def _waits_for_evaluation(scheduler: LRScheduler) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau)


def _parts(scheduler: Any) -> list[LRScheduler]:
    """Return the schedulers that one is made of, at any depth."""
    inner = list(getattr(scheduler, "_schedulers", ()))
    return inner + [part for each in inner for part in _parts(each)]


def _refuse_ambiguous(schedulers: Mapping[str, LRScheduler]) -> None:
    for name, scheduler in schedulers.items():
        for part in (scheduler, *_parts(scheduler)):
            if isinstance(part, _AMBIGUOUS):
                raise FsdpError(
                    f"{name} ({type(part).__name__}) may count steps or epochs; type "
                    "--scheduler-every step or --scheduler-every epoch"
                )


def _refuses_more(scheduler: Any) -> bool:
    """Return whether a scheduler raises at a step after its last."""
    if isinstance(scheduler, SequentialLR):
        return _refuses_more(scheduler._schedulers[-1])
    return isinstance(scheduler, OneCycleLR)


def _total_of_last(scheduler: Any) -> int:
    """Return the steps that the part which refuses more is made for."""
    if isinstance(scheduler, SequentialLR):
        return _total_of_last(scheduler._schedulers[-1])
    return int(scheduler.total_steps)


def _horizon(scheduler: Any) -> int | None:
    """Return after how many of its steps a scheduler ends, if it says so."""
    if isinstance(scheduler, SequentialLR):
        last = _horizon(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    if isinstance(scheduler, ChainedScheduler):
        known = [h for part in scheduler._schedulers if (h := _horizon(part)) is not None]
        return max(known, default=None)
    for name in _HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int):
            # a warm-up by itself does not say when training ends
            return None if name == "total_iters" and _is_warm_up(scheduler) else value
    for function in getattr(scheduler, "lr_lambdas", ()):
        value = getattr(function, "keywords", {}).get(_HORIZON_OF_LAMBDA)
        if isinstance(value, int):
            return value
    return None


def _is_warm_up(scheduler: Any) -> bool:
    return type(scheduler).__name__ in ("LinearLR", "ConstantLR")
