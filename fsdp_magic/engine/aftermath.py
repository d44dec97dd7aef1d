"""ENGINE: what follows a step of a run: the person's function, schedulers, evaluation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.records import StepResult
from fsdp_magic.engine.schedulers import Schedulers
from fsdp_magic.engine.step import Step


class AfterStep:
    """The function that ``--after-step`` names.

    It is called without arguments, or with a dict of the step's global values if it takes one:
    ``step``, ``loss``, ``grad_norm``, each metric by its name, and of the newest evaluation
    ``eval_step``, ``eval_loss`` and ``eval_`` with each metric. Only then are they brought
    together, which waits for the device.

    Args:
        function: the person's.
        flag: what named it, for errors.
        world_size: number of ranks.

    Raises:
        FsdpError: if it cannot be called so.
    """

    def __init__(self, function: Callable[..., Any], *, world_size: int) -> None:
        if not callable(function):
            raise FsdpError(
                f"--after-step is a {type(function).__name__}; it takes a function of the engines"
            )
        self._function = function
        self._world_size = world_size
        self._takes_values = _takes_one(function)

    def __call__(self, step: int, result: StepResult, newest: EvaluationRecord | None) -> None:
        """Call it after a step.

        Collective: every rank must call this.
        """
        if not self._takes_values:
            with INTERRUPTS.allowed():
                self._function()
            return
        values = self._global_values(step, result)
        if newest is not None:
            values |= {"eval_step": newest.step, "eval_loss": newest.loss}
            values |= {f"eval_{name}": value for name, value in newest.metrics.items()}
        with INTERRUPTS.allowed():
            self._function(values)

    def _global_values(self, step: int, result: StepResult) -> dict[str, Any]:
        mine = {n: (float(t), float(w)) for n, (t, w) in result.metrics.sums.items()}
        share = None if result.loss is None else float(result.loss)
        ranks: list[Any] = [None] * self._world_size
        dist.all_gather_object(ranks, (share, mine))
        shares = [share for share, _ in ranks if share is not None]
        values: dict[str, Any] = {
            "step": step,
            "loss": math.fsum(shares) if shares else None,
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
        }
        for name in dict.fromkeys(name for _, sums in ranks for name in sums):
            both = [sums[name] for _, sums in ranks if name in sums]
            weight = sum(w for _, w in both)
            values[name] = sum(t for t, _ in both) / weight if weight else float("nan")
        return values


@dataclass(slots=True, kw_only=True)
class AfterSteps:
    """What follows each step and epoch.

    Attributes:
        step: whose optimizers have stepped.
        schedulers: None with ``--manual``.
        function: the person's; None: there is none.
        evaluate: makes an evaluation, given the steps done, or returns None if the person stopped
            it; None: none is wanted.
        every: steps between evaluations, or ``epoch``.
        evaluations: made so far.
        epochs_ended: so far.
    """

    step: Step
    schedulers: Schedulers | None
    function: AfterStep | None
    evaluate: Callable[[int], EvaluationRecord | None] | None
    every: int | str | None
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    epochs_ended: int = 0

    def after_step(self, step: int, result: StepResult) -> None:
        """Do what follows a step that is done.

        Collective: every rank must call this.
        """
        if self.schedulers is not None:
            self.schedulers.after_step(self.step.stepped)
        if self.function is not None:
            newest = self.evaluations[-1] if self.evaluations else None
            self.function(step, result, newest)
        if isinstance(self.every, int) and (step + 1) % self.every == 0:
            self._evaluate(step)

    def after_epoch(self, step: int) -> None:
        """Do what follows the last step of an epoch.

        Collective: every rank must call this.
        """
        self.epochs_ended += 1
        if self.schedulers is not None:
            self.schedulers.after_epoch()
        if self.every == "epoch":
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        if self.evaluate is None:
            return
        record = self.evaluate(step + 1)
        if record is None:
            return
        self.evaluations.append(record)
        if self.schedulers is not None and record.loss is not None:
            self.schedulers.after_evaluation(record.loss)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Return whether a function takes the values; it may also take nothing.

    Raises:
        FsdpError: if it can be called in neither way.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin says nothing of its arguments
        return False
    ways: tuple[tuple[Any, ...], ...] = ((), ({},))
    for arguments in ways:
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        # one whose only argument has a default is more likely to want it
        return bool(arguments) or any(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            for p in signature.parameters.values()
        )
    raise FsdpError(
        f"--after-step {getattr(function, '__name__', function)} takes {signature}; it is called "
        "without arguments, or with one: a dict of the step's values"
    )
