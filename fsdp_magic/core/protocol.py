"""What crosses between the kernel and the engines: requests down, reports up; data only, pure.

Every verb of ``engine/verbs.py`` takes one of the requests and answers with a ``Reply``; while
a training run is under way each rank publishes ``ProgressReport`` records beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fsdp_magic.core.placement import Placement
from fsdp_magic.core.specs import ModelSpec, TrainSpec

CALL_NAME = "_fsdp_magic_call"
"""The name under which an engine offers ``verbs.call``; the kernel ships this name, no code."""

PROGRESS_KEY = "fsdp_magic.progress"
"""The key of published progress in an ipyparallel data message."""

KERNEL_PID_VARIABLE = "FSDP_MAGIC_KERNEL_PID"
LOCAL_ORDER_VARIABLE = "FSDP_MAGIC_LOCAL_ORDER"
"""Environment of an engine: whom it must not outlive, and its place on its host."""

FailureKind = Literal["raised", "interrupted", "released", "out_of_memory", "usage"]
DeviceKind = Literal["cuda", "cpu"]
TransportKind = Literal["gloo", "nccl"]
RunState = Literal["starting", "running", "done", "stopped", "failed"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRequest:
    """Say who you are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Run a cell as ordinary Python. ``name`` is its file name in tracebacks."""

    code: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Run a cell, then shard what it built."""

    code: str
    name: str
    spec: ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Run a cell as training steps.

    Attributes:
        code: the cell; it binds ``loss``.
        name: its file name in tracebacks.
        run_id: marks every report of this run.
        spec: the options.
    """

    code: str
    name: str
    run_id: int
    spec: TrainSpec


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
class ShardsRequest:
    """Describe where the parameters of a sharded model live; ``""``: the only model."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """Describe this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverRequest:
    """After a failed cell: replace the transports and forget the step that was torn.

    Attributes:
        generation: number of the transports to come; every rank gets the same.
    """

    generation: int


Request = (
    HelloRequest
    | JoinRequest
    | RunRequest
    | ModelRequest
    | TrainRequest
    | PushRequest
    | PullRequest
    | ShardsRequest
    | StatusRequest
    | RecoverRequest
)


# ---------------------------------------------------------------- reports: engine -> kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a cell did not finish on one rank.

    Attributes:
        kind: ``raised`` by the cell itself; ``interrupted`` by the person; ``released``:
            stopped because a peer failed; ``out_of_memory``; ``usage``: refused before it ran.
        exception_type: name of the exception's class.
        message: its text.
        traceback: the person's frames only, as text, without the last line.
        notes: sentences a person should read beside it.
    """

    kind: FailureKind
    exception_type: str
    message: str
    traceback: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a verb answers: a report, or a failure, or (a run that failed) both."""

    rank: int
    report: Any = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutput:
    """What a cell left on one rank.

    Attributes:
        rank: the rank.
        stdout, stderr: everything it printed.
        result: ``repr`` of the last expression; None if there is none or it ends in ``;``.
    """

    rank: int
    stdout: str = ""
    stderr: str = ""
    result: str | None = None


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
class MemorySample:
    """Memory of one rank's device at one moment, in bytes; None is unknown.

    allocated: held by tensors; reserved: held by the caching allocator (on CPU: by malloc);
    used: of the whole device, other processes included.
    """

    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int
    capacity_bytes: int | None
    peak_allocated_bytes: int
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        """Allocated, but neither parameter, gradient nor optimizer state."""
        known = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return max(0, self.allocated_bytes - known)

    @property
    def cache_bytes(self) -> int:
        """Reserved by the allocator, not held by a tensor."""
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def other_bytes(self) -> int:
        """Used on the device beyond this allocator, other processes included."""
        return max(0, self.used_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """How busy a device is; None is unknown (always, on CPU)."""

    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank, as ``%fsdp_status`` shows it.

    Attributes:
        device: ``cpu`` or ``cuda:N``.
        device_name: the card's name, or the processor's.
        models: names of the sharded models.
        steps: optimizer steps done with them.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    device_name: str
    memory: MemorySample
    activity: DeviceSample = DeviceSample()
    models: tuple[str, ...] = ()
    steps: int = 0
    torch_version: str = ""

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by tensors."""
        return self.memory.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes held by the allocator."""
        return self.memory.reserved_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes used on the whole device."""
        return self.memory.used_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """Size of the device in bytes, as far as this rank may use it."""
        return self.memory.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords:
    """Numbers of consecutive steps on one rank; the kernel adds the ranks up.

    Attributes:
        first: index in the run of the first step in here.
        losses: this rank's share of the global loss of each step: the shares of all ranks
            add up to it.
        grad_norms: global gradient norm of each step, before clipping.
        samples: samples this rank took in each step.
        tokens: tokens this rank took in each step; None where batches have none.
    """

    first: int = 0
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """What one rank publishes twice a second during a run.

    Attributes:
        run_id: the run it belongs to; others are dropped.
        steps: optimizer steps finished in this run.
        total_steps: steps the run will take; None: not known.
        records: the steps since the last report.
        memory: now.
        peak_memory: at the moment of the highest allocation so far.
        seconds: since the first step began.
        device_name: the card's name, or the processor's.
        first_step: ``step`` of the run's first step.
        samples_per_step: samples of all ranks in one step; None where batches have none.
        micro_batch_size: samples of this rank in one micro-step.
        notes: sentences a person should read once.
    """

    run_id: int
    rank: int
    steps: int
    total_steps: int | None
    records: StepRecords
    memory: MemorySample
    peak_memory: MemorySample
    activity: DeviceSample
    seconds: float
    device_name: str
    first_step: int
    samples_per_step: int | None
    micro_batch_size: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """How a training run ended on one rank.

    Attributes:
        records: every step of the run.
        stopped: whether it ended at the person's wish before its last step.
        mean_activity: the device's mean over the run.
    """

    rank: int
    steps: int
    total_steps: int | None
    stopped: bool
    seconds: float
    records: StepRecords
    memory: MemorySample
    peak_memory: MemorySample
    mean_activity: DeviceSample
    device_name: str
    first_step: int
    samples_per_step: int | None
    micro_batch_size: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What ``%%fsdp_model`` did on one rank: a placement for each model it sharded."""

    placements: tuple[Placement, ...]
    result: str | None = None
    notes: tuple[str, ...] = ()
