"""What crosses between the kernel and the engines: requests down, reports up; data only, pure.

Every verb of ``engine/verbs.py`` takes one of the requests and answers with a ``Reply``; while
a training run is under way each rank publishes ``ProgressReport`` records beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_magic.core.cell_output import ResultReport
from fsdp_magic.core.completion import CompleteRequest
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.recovery import RestoreReport, RestoreRequest
from fsdp_magic.core.specs import EvalSpec, ModelSpec, TrainSpec
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.core.whereabouts import Whereabouts

CALL_NAME = "_fsdp_magic_call"
"""The name under which an engine offers ``verbs.call``; the kernel ships this name, no code."""

PROGRESS_KEY = "fsdp_magic.progress"
"""The key of published progress in an ipyparallel data message."""

DIGESTS = 4096
"""Signatures of messages that each side remembers, so that none is taken twice; Jupyter's own
bound is 65,536, and until it is reached every cell leaves some behind."""

KERNEL_PID_VARIABLE = "FSDP_MAGIC_KERNEL_PID"
LOCAL_ORDER_VARIABLE = "FSDP_MAGIC_LOCAL_ORDER"
"""Environment of an engine: whom it must not outlive, and its place on its host."""

FailureKind = Literal["raised", "interrupted", "released", "out_of_memory", "usage", "diverged"]
DeviceKind = Literal["cuda", "cpu"]
TransportKind = Literal["gloo", "nccl"]


# ---------------------------------------------------------------- requests: kernel -> engine


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Take a rank and join the world.

    Attributes:
        rank, world_size: of the whole world.
        local_rank, local_world_size: on this host.
        directory: a 0700 directory on this host for the rendezvous and the shared page.
        device: what the rank computes on.
        cuda_index: which visible GPU, for ``cuda``.
        transport: what moves CUDA tensors; CPU tensors always move by gloo.
        memory_limit_bytes: size of the device that a CPU rank pretends to be; None: no limit.
        gpu_fraction: the share of its GPU that the rank may use; None: all of it.
        seed: of every random generator.
        defaults: the session's strategy options.
        snapshots: paths of the files for its snapshots, in memory that the kernel owns.
        generation: of the transports; more than 1: the others are there already.
        replaced: the ranks that have fresh engines, when those join the others.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    directory: str
    device: DeviceKind
    cuda_index: int | None
    transport: TransportKind
    memory_limit_bytes: int | None
    gpu_fraction: float | None
    seed: int
    defaults: ModelSpec
    snapshots: tuple[str, ...] = ()
    generation: int = 1
    replaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRequest:
    """Say who you are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Run a cell as ordinary Python.

    Attributes:
        code: the cell.
        name: its file name in tracebacks.
        ranks: that run it; None: all.
    """

    code: str
    name: str
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Run a cell, then shard what it built.

    Attributes:
        code: the cell.
        name: its file name in tracebacks.
        spec: the options.
        restore: whether it gets what a snapshot of lost engines holds.
    """

    code: str
    name: str
    spec: ModelSpec
    restore: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Run a cell over data without gradients.

    Attributes:
        code: the cell; it binds ``loss``, ``metrics`` or ``collect``.
        name: its file name in tracebacks.
        spec: the options.
    """

    code: str
    name: str
    spec: EvalSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Run a cell as training steps.

    Attributes:
        code: the cell; it binds ``loss``.
        name: its file name in tracebacks.
        run_id: marks every report of this run.
        spec: the options.
        evaluation: what ``--eval-every`` runs; None: the cell itself, on ``--eval-data``.
        steps_left: of the run that this one resumes; None: take those that the spec says.
    """

    code: str
    name: str
    run_id: int
    spec: TrainSpec
    evaluation: EvalRequest | None = None
    steps_left: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest:
    """Bind variables. ``variables``: each pickled, by name."""

    variables: dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Evaluate an expression.

    Attributes:
        expression: Python; a sharded tensor in its value is gathered by all ranks.
        wanted: whether this rank's value is to be sent, or only its part in gathering.
        limit_bytes: refuse to send more than this; None: no limit.
    """

    expression: str
    wanted: bool
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRequest:
    """Say which number an expression stands for."""

    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsRequest:
    """Describe where the parameters of a sharded model live; ``""``: the only model."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """Describe this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleRequest:
    """Listen for a console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverRequest:
    """After a failed cell: replace the transports and forget the step that was torn.

    Attributes:
        generation: number of the transports to come; every rank gets the same.
        replaced: the ranks that have fresh engines, which join at the same time.
    """

    generation: int
    replaced: tuple[int, ...] = ()


Request = (
    HelloRequest
    | JoinRequest
    | RunRequest
    | ModelRequest
    | EvalRequest
    | TrainRequest
    | PushRequest
    | PullRequest
    | NumberRequest
    | ShardsRequest
    | StatusRequest
    | CompleteRequest
    | ConsoleRequest
    | RecoverRequest
    | RestoreRequest
)


# ---------------------------------------------------------------- reports: engine -> kernel


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
    """

    where: str
    asked_bytes: int | None
    allocated_bytes: int
    used_bytes: int
    capacity_bytes: int | None
    advice: str = ""


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
