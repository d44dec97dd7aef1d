"""What engines answer to the kernel: a report, or why there is none; data only, pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_magic.core.cell_output import ResultReport
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.recovery import RestoreReport
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.core.whereabouts import Whereabouts

FailureKind = Literal["raised", "interrupted", "released", "out_of_memory", "usage", "diverged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """How full a device was when no more could be allocated.

    Attributes:
        where: phase and line of the cell, as words to put into a sentence; may be empty.
        asked_bytes: what was asked for; None: nobody knows.
        allocated_bytes: what tensors held once the exception had left their operations.
        used_bytes: of the whole device, what the allocator had not given back included.
        capacity_bytes: of the device; None: nobody knows.
        advice: what to try.
        held: names of the cell that still hold much of it, with their bytes.
    """

    where: str
    asked_bytes: int | None
    allocated_bytes: int
    used_bytes: int
    capacity_bytes: int | None
    advice: str = ""
    held: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a cell did not finish on one rank.

    Attributes:
        kind: ``raised`` by the cell itself; ``interrupted`` by the person; ``released``:
            stopped because a peer failed; ``out_of_memory``; ``usage``: refused before it ran;
            ``diverged``: ranks did different things.
        exception_type: name of the exception's class.
        message: its text.
        traceback: the person's frames only, as text, without the last line.
        notes: sentences a person should read beside it.
        where: it was, of a rank that was stopped or diverged.
        memory: how full the device was, if it was out of memory and that is known.
    """

    kind: FailureKind
    exception_type: str
    message: str
    traceback: str = ""
    notes: tuple[str, ...] = ()
    where: Whereabouts | None = None
    memory: OutOfMemory | None = None

    def with_advice(self, advice: str) -> Failure:
        """Return the same with what to try, if memory ran out."""
        if self.memory is None:
            return self
        return replace(self, memory=replace(self.memory, advice=advice))

    def with_held(self, held: tuple[tuple[str, int], ...]) -> Failure:
        """Return the same with what names of the cell still hold, if memory ran out."""
        if self.memory is None:
            return self
        return replace(self, memory=replace(self.memory, held=held))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a verb answers: a report, or a failure, or (a run that failed) both."""

    rank: int
    report: Any = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReport:
    """Who an engine is: enough to give it a rank.

    Attributes:
        host, pid: where it runs.
        local_order: its place among the engines started on its host.
        torch_version: the version it imported.
    """

    host: str
    pid: int
    local_order: int
    torch_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What ``%%fsdp_model`` did on one rank.

    Attributes:
        placements: of each model that it sharded, or else left alone.
        starts_anew: whether it sharded any, so that steps count from 0 again.
        result: the last expression.
        notes: sentences a person should read.
        restored: the snapshot that was put into them; None: none was asked for, or fits.
    """

    placements: tuple[Placement, ...]
    starts_anew: bool = True
    result: ResultReport = field(default_factory=ResultReport)
    notes: tuple[str, ...] = ()
    restored: RestoreReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """What ``%%fsdp_eval`` found: the whole result, and this rank's rows.

    Attributes:
        record: over all ranks.
        rows: what the cell collected here, in pieces: the place of the first sample in the data,
            and by name an array or a list with one row per sample.
        seconds: it took.
        notes: sentences a person should read.
    """

    record: EvaluationRecord
    rows: tuple[tuple[int, dict[str, Any]], ...]
    seconds: float
    notes: tuple[str, ...] = ()
