"""Training loops of 2022: how their optimizers worked."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_magic.core.planning.step_trace import (
    Freed,
    OptimizerAllocated,
    OptimizerEvent,
    OptimizerTrace,
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
