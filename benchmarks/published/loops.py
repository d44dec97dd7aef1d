"""Training loops of 2022: how their optimizers worked, and what they did not do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Freed,
    OptimizerAllocated,
    OptimizerEvent,
    OptimizerTrace,
    StepTrace,
)


def one_parameter_at_a_time(names: Iterable[str], *, temporaries: int = 1) -> OptimizerTrace:
    """Return AdamW with a loop over parameters: two states each, made in the first step.

    Args:
        names: of the parameters.
        temporaries: of a parameter's size at once. ``AdamW.step`` of transformers has one, the
            square root of the second moment; ``_single_tensor_adamw`` of torch 1.12 two, that root
            and its quotient.
    """
    first: list[OptimizerEvent] = []
    later: list[OptimizerEvent] = []
    number = 0
    for name in names:
        first += [OptimizerAllocated(number + n, name, 4.0, 0.0, "optimizer") for n in range(2)]
        made = range(number + 2, number + 2 + temporaries)
        for events in (first, later):
            events += [OptimizerAllocated(n, name, 4.0, 0.0, "temporary") for n in made]
            events += [Freed(n) for n in made]
        number += 2 + temporaries
    return OptimizerTrace(
        name="AdamW, one parameter at a time", first=tuple(first), later=tuple(later)
    )


def without_buffers(trace: StepTrace) -> StepTrace:
    """Return a trace whose buffers an overlay takes itself: nobody copied them to roll back."""
    return dataclasses.replace(trace, standing=())


def take_buffers(ledger: Ledger, buffers: Iterable[Allocated]) -> None:
    """Take the buffers of a model, for good."""
    for buffer in buffers:
        ledger.take(("buffer", buffer.id), buffer.size, "buffer", place=buffer.place)
