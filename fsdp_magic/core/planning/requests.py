"""What the tracing process is asked and reports; data only, pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fsdp_magic.core.planning.step_trace import StepTrace


class TraceVariant(NamedTuple):
    """What a trace depends on beside the program; all else is an overlay."""

    precision: str = "fp32"
    activation_checkpointing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Trace a program.

    Attributes:
        code: the cell, which binds ``model`` and, if it likes, ``optimizer``,
            ``example_batch(b)`` and ``loss_fn(model, batch)``.
        name: its file name in tracebacks.
        variants: what is traced.
        wraps: rules whose units are wanted.
        sequence_length: for the default batch of models of transformers; None: the model's own.
        device_kind: of which kernels.
    """

    code: str
    name: str
    variants: tuple[TraceVariant, ...] = (TraceVariant(),)
    wraps: tuple[str, ...] = ("blocks",)
    sequence_length: int | None = None
    device_kind: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """What was traced.

    Attributes:
        traces: by variant.
        seconds: it took.
        notes: sentences a person should read (which defaults were taken).
    """

    traces: dict[TraceVariant, StepTrace]
    seconds: float
    notes: tuple[str, ...] = field(default=())
