"""What the tracing process is asked and reports; data only, pure.

The kernel writes one ``TraceRequest`` to its standard input. It answers with any number of
``TracePrinted`` and at last a ``TraceReport`` or a ``TraceFailed``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fsdp_magic.core.planning.step_trace import StepTrace
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.reply import Failure
from fsdp_magic.core.specs import ModelSpec

DeviceKind = Literal["cuda", "cpu"]
"""Of which operators a trace is."""


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
    device_kind: DeviceKind = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Trace the models, data and last training cell of an engine, in a fork of it.

    Attributes:
        training: the cell, with the options it ran with.
        variants: what is traced.
        wraps: rules whose units are wanted.
        sequence_length: tokens of each sample; None: as the data has them.
        device_kind: of which kernels.
    """

    training: TrainRequest
    variants: tuple[TraceVariant, ...]
    wraps: tuple[str, ...]
    sequence_length: int | None = None
    device_kind: DeviceKind = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRequest:
    """Say how the models of an engine were built, and what its device holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltReport:
    """How the models of a session were built.

    Attributes:
        specs: by name.
        ranks_on_host: ranks of this host.
        capacity_bytes: of this rank's device; None: nobody knows.
    """

    specs: dict[str, ModelSpec]
    ranks_on_host: int
    capacity_bytes: int | None


class FileRead(NamedTuple):
    """A file of the person's that the cell has read; ``digest``: of its content, empty: unknown."""

    path: str
    size: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """What was traced.

    Attributes:
        traces: by variant.
        seconds: it took.
        notes: sentences a person should read (which defaults were taken).
        files: that the cell read; None: nobody knows which, or too many.
        cached: whether nothing had to be traced.
        untraced: why a variant has no trace, in a line, by variant.
    """

    traces: dict[TraceVariant, StepTrace]
    seconds: float
    notes: tuple[str, ...] = field(default=())
    files: tuple[FileRead, ...] | None = None
    cached: bool = False
    untraced: dict[TraceVariant, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePrinted:
    """What the cell printed on a stream."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFailed:
    """Why there is no report."""

    failure: Failure
