"""A traced step under a strategy: what one rank takes and gives back over two steps; pure.

The trace is of one process. An overlay is told of every mark that the step passes, and adds what
its strategy has on a rank: parameters, what it gathers, gradients, what its collectives need, and
the optimizer's state. Two steps are replayed: the first makes the optimizer's state, the second
is every later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Freed,
    OptimizerAllocated,
    OptimizerEvent,
    Reached,
    Size,
    StepTrace,
    TracedParameter,
)
from fsdp_magic.core.specs.strategy import AccumulateSync, Strategy

Backend = Literal["nccl", "gloo"]
_MOST_MICRO_STEPS = 3
"""A first, one in between and a last one: any more repeat the one in between."""
BATCHES = "micro-batches of a step"
_SMALL_BUFFER_BYTES = 64 * 1024
"""Source: ``_SMALL_BYTES`` of engine/rollback.py: such are kept before every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a model is spread, beside what the trace was made with.

    Attributes:
        strategy: the strategy.
        world_size: ranks.
        shard_size: ranks that share one copy under ``hybrid_shard``.
        wrap: the rule that makes units; one of those the trace has.
        cpu_offload: whether shards are kept in host memory.
        accumulate: micro-steps of a step.
        accumulate_sync: when gradients are reduced.
        backend: whose collectives are used.
    """

    strategy: Strategy = "full_shard"
    world_size: int = 2
    shard_size: int | None = None
    wrap: str = "blocks"
    cpu_offload: bool = False
    accumulate: int = 1
    accumulate_sync: AccumulateSync | None = None
    backend: Backend = "nccl"


class Overlay:
    """What a strategy adds to a step of one rank; each strategy is a subclass.

    Args:
        trace: of one process.
        setting: how it is spread.

    Attributes:
        ledger: where it is written.
        step: the number of the step that is replayed.
    """

    def __init__(self, trace: StepTrace, setting: Setting) -> None:
        self.trace = trace
        self.setting = setting
        self.ledger = Ledger()
        self.step = 1

    def begin(self) -> None:
        """Take what is there before the first step: parameters."""
        raise NotImplementedError

    def has(self, allocated: Allocated) -> bool:  # noqa: ARG002
        """Return whether what one process took in the trace is there under the strategy too."""
        return True

    def passes(self, reached: Reached, *, is_last: bool) -> None:
        """Do what the strategy does at a mark of a micro-step.

        Args:
            reached: the mark.
            is_last: whether the micro-step is the last one of its step.
        """
        raise NotImplementedError

    def reduce(self) -> None:
        """Do what is left to reduce once all micro-steps are done."""

    def optimizer_elements(self, parameter: TracedParameter) -> int:
        """Return how many elements of a parameter the optimizer of this rank has; 0: none."""
        raise NotImplementedError

    def updated(self) -> None:
        """Do what follows the optimizer's step, then free the gradients."""
        raise NotImplementedError


def replay(
    overlay: Overlay, *, steps: int = 2, most_micro_steps: int = _MOST_MICRO_STEPS
) -> Ledger:
    """Replay steps under an overlay, and return what was taken and given back.

    Args:
        overlay: fresh.
        steps: how many.
        most_micro_steps: of a step; more repeat those in between.
    """
    trace, ledger = overlay.trace, overlay.ledger
    overlay.begin()
    for held in trace.standing:
        ledger.take(("standing", held.id), held.size, held.kind, place=held.place)
    micro_steps = min(overlay.setting.accumulate, most_micro_steps)
    number = 0
    for step in range(1, steps + 1):
        overlay.step = step
        _take_batches(overlay)
        _keep_buffers(overlay)
        for micro_step in range(1, micro_steps + 1):
            number += 1
            _micro_step(overlay, number, is_last=micro_step == micro_steps)
        overlay.reduce()
        ledger.enter(f"step {step}: optimizer")
        for event in trace.optimizer.first if step == 1 else trace.optimizer.later:
            _step_optimizer(overlay, event)
        overlay.updated()
    return ledger


def _take_batches(overlay: Overlay) -> None:
    """Take the batches of all micro-steps, then let go of those of the step before.

    Source: ``StepBatches`` of engine/data.py, which has a step's batches from its beginning to its
    end.
    """
    ledger, step, times = overlay.ledger, overlay.step, overlay.setting.accumulate
    before = ledger.held(BATCHES)
    for event in overlay.trace.micro_step:
        if isinstance(event, Allocated) and event.kind == "input":
            size = Size(*(times * part for part in event.size))
            ledger.take((BATCHES, step, event.id), size, "input", place=event.place)
    for key in before:
        ledger.give_back(key)


def _keep_buffers(overlay: Overlay) -> None:
    """Copy buffers, to be put back if the step fails: first all, later those that may move.

    Source: ``StepUndo`` of engine/rollback.py.
    """
    ledger = overlay.ledger
    for buffer in overlay.trace.standing:
        key = ("copy of a buffer, for rolling back", buffer.id)
        if overlay.step == 1:
            ledger.take(key, buffer.size, "buffer", place=buffer.place)
        elif buffer.size.fixed > _SMALL_BUFFER_BYTES and not _normalises(overlay, buffer.place):
            ledger.give_back(key)


def _normalises(overlay: Overlay, place: str) -> bool:
    """Return whether a module has running statistics."""
    module = overlay.trace.modules.get(place)
    return module is not None and "BatchNorm" in module.class_name


def _micro_step(overlay: Overlay, number: int, *, is_last: bool) -> None:
    """Replay one forward and backward, the number-th of all."""
    ledger = overlay.ledger
    ledger.enter(f"step {overlay.step}: forward")
    for event in overlay.trace.micro_step:
        if isinstance(event, Allocated):
            if event.kind != "input" and overlay.has(event):
                key = ("traced", number, event.id)
                ledger.take(key, event.size, event.kind, place=event.place)
        elif isinstance(event, Freed):
            ledger.give_back(("traced", number - event.carried, event.id))
        else:
            if event.mark == "backward":
                ledger.enter(f"step {overlay.step}: backward")
            overlay.passes(event, is_last=is_last)


def _step_optimizer(overlay: Overlay, event: OptimizerEvent) -> None:
    """Take or give back what an optimizer does, in the sizes of this rank."""
    key = ("optimizer", overlay.step, event.id)
    if isinstance(event, OptimizerAllocated):
        parameter = overlay.trace.parameters.get(event.parameter)
        elements = overlay.optimizer_elements(parameter) if parameter else 0
        size = Size(
            event.fixed * (parameter is None or elements > 0) + event.per_element * elements
        )
        overlay.ledger.take(key, size, event.kind, place=event.parameter)
    else:
        overlay.ledger.give_back(("optimizer", overlay.step - event.carried, event.id))
