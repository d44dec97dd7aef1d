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
    """

    def __init__(self, trace: StepTrace, setting: Setting) -> None:
        self.trace = trace
        self.setting = setting
        self.ledger = Ledger()

    def begin(self) -> None:
        """Take what is there before the first step: parameters."""
        raise NotImplementedError

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


def replay(overlay: Overlay, *, steps: int = 2) -> Ledger:
    """Replay steps under an overlay, and return what was taken and given back."""
    trace, ledger = overlay.trace, overlay.ledger
    overlay.begin()
    for held in trace.standing:
        ledger.take(("standing", held.id), held.size, held.kind, place=held.place)
    micro_steps = min(overlay.setting.accumulate, _MOST_MICRO_STEPS)
    number = 0
    for step in range(1, steps + 1):
        for micro_step in range(1, micro_steps + 1):
            number += 1
            ledger.enter(f"step {step}: forward")
            for event in trace.micro_step:
                if isinstance(event, Allocated):
                    key = ("traced", number, event.id)
                    ledger.take(key, event.size, event.kind, place=event.place)
                elif isinstance(event, Freed):
                    ledger.give_back(("traced", number - event.carried, event.id))
                else:
                    if event.mark == "backward":
                        ledger.enter(f"step {step}: backward")
                    overlay.passes(event, is_last=micro_step == micro_steps)
        overlay.reduce()
        ledger.enter(f"step {step}: optimizer")
        events = trace.optimizer.first if step == 1 else trace.optimizer.later
        for optimizer_event in events:
            _step_optimizer(overlay, optimizer_event, step)
        overlay.updated()
    return ledger


def _step_optimizer(overlay: Overlay, event: OptimizerEvent, step: int) -> None:
    """Take or give back what an optimizer does, in the sizes of this rank."""
    key = ("optimizer", step, event.id)
    if isinstance(event, OptimizerAllocated):
        parameter = overlay.trace.parameters.get(event.parameter)
        elements = overlay.optimizer_elements(parameter) if parameter else 0
        size = Size(
            event.fixed * (parameter is None or elements > 0) + event.per_element * elements
        )
        overlay.ledger.take(key, size, event.kind)
    else:
        overlay.ledger.give_back(("optimizer", step - event.carried, event.id))
