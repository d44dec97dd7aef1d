"""ENGINE: a fake model computing as an engine would have it: in a precision, with checkpointing.

What ``engine/parallel`` lays around a model's forwards for strategies with whole parameters is
laid here by the same code, and taken off afterwards. Casts of parameters then show in the trace;
strategies that gather low-precision copies leave them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import activation_checkpointing, precision
from fsdp_magic.engine.parallel.casting import compute_in
from fsdp_magic.engine.parallel.unspread import Shape


@contextmanager
def computing_as(
    model: nn.Module, variant: TraceVariant, units: Sequence[tuple[nn.Module, ...]]
) -> Iterator[ModelSpec]:
    """Have a model compute as a variant says inside.

    Args:
        model: changed inside, in place.
        variant: its precision, and what it computes again in backward.
        units: what is gathered at once.

    Yields:
        The options that this is.
    """
    spec = ModelSpec(
        precision=variant.precision,  # type: ignore[arg-type]
        activation_checkpointing=variant.activation_checkpointing or False,  # type: ignore[arg-type]
    )
    before = Shape(model.modules())
    try:
        activation_checkpointing.apply(model, units, spec)
        precision.cast_inputs(model, spec)
        dtype = precision.compute_dtype(spec)
        if dtype is not None:
            compute_in(model, units, dtype)
        yield spec
    finally:
        before.put_back()
