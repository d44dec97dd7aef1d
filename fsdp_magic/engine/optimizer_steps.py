"""ENGINE: how many optimizer steps a cell began and completed on this rank.

Weights change in ``optimizer.step()`` and nowhere else that we know of. So after a failed cell
the counts of all ranks tell whether some have taken a step that others have not, or are in the
middle of one: then the step is torn. Counted in every kind of cell, by torch's own hooks, for the
optimizers that hold a part of a spread model or that a run trains; one of a rank's own is that
rank's business.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_magic.core.recovery import StepCount
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.parallel.whole_models import is_any_held_whole


@dataclass(slots=True)
class _Count:
    """Steps of one optimizer; those of one that nobody shares do not count."""

    shared: bool
    begun: int = 0
    completed: int = 0


class OptimizerSteps:
    """The optimizer steps of the cell that is running, or that ran last."""

    def __init__(self) -> None:
        self._trained: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._of: weakref.WeakKeyDictionary[Optimizer, _Count] = weakref.WeakKeyDictionary()
        self._counts: list[_Count] = []  # also of optimizers that are gone
        self._before: int | None = None

    def install(self) -> None:
        """Begin to count; once in a process."""
        register_optimizer_step_pre_hook(self._begun)
        register_optimizer_step_post_hook(self._completed)

    def reset(self) -> None:
        """Count from here: a cell begins, or all that was stepped was put back."""
        self._of.clear()
        self._counts.clear()
        self._before = None

    def train(self, optimizers: Iterable[Optimizer]) -> None:
        """Note which optimizers a run trains; they count, whatever they hold."""
        self._trained.update(optimizers)

    def refused(self, optimizer: Optimizer) -> None:
        """Take back a step that was begun and not let through."""
        self._of[optimizer].begun -= 1

    @contextmanager
    def within_step(self) -> Iterator[None]:
        """Have a manual step inside, which may fail after some of its optimizers stepped."""
        self._before = self._total
        yield
        self._before = None

    @property
    def some_within_step(self) -> bool:
        """Whether the manual step that failed had completed a step of some optimizer."""
        return self._before is not None and self._total > self._before

    @property
    def _total(self) -> int:
        return sum(each.completed for each in self._counts if each.shared)

    def counts(self) -> tuple[StepCount, ...]:
        """Return the steps by optimizer, in the order in which they first stepped."""
        return tuple(
            StepCount(begun=each.begun, completed=each.completed)
            for each in self._counts
            if each.shared and each.begun
        )

    def count_of(self, optimizer: Optimizer) -> StepCount:
        """Return the steps of one optimizer."""
        count = self._of.get(optimizer)
        if count is None:
            return StepCount(begun=0, completed=0)
        return StepCount(begun=count.begun, completed=count.completed)

    def _begun(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        count = self._of.get(optimizer)
        if count is None:
            count = self._of[optimizer] = _Count(self._is_shared(optimizer))
            self._counts.append(count)
        count.begun += 1

    def _completed(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        count = self._of.get(optimizer)
        if count is not None:
            count.completed += 1

    def _is_shared(self, optimizer: Optimizer) -> bool:
        if optimizer in self._trained:
            return True
        held = parameters_of(optimizer)
        return any(isinstance(p, DTensor) for p in held) or is_any_held_whole(held)


STEPS = OptimizerSteps()
"""The process has one, as torch has one set of hooks."""
