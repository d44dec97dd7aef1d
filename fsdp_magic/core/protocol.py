"""What the kernel asks of engines; data only, pure.

Every verb of ``engine/verbs.py`` takes one of the requests and answers with a ``Reply`` of
``core/reply.py``; while a training run is under way each rank publishes ``ProgressReport`` records
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_magic.core.comparison import CompareRequest, PutBackRequest, SetAsideRequest
from fsdp_magic.core.completion import CompleteRequest
from fsdp_magic.core.recovery import RestoreRequest
from fsdp_magic.core.specs import EvalSpec, ModelSpec, TrainSpec
from fsdp_magic.core.tuning import HoldRequest, RoomRequest

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

DeviceKind = Literal["cuda", "cpu"]
TransportKind = Literal["gloo", "nccl"]


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
        lost_models: names of the models that went with the engines before these.
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
    lost_models: tuple[str, ...] = ()


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
        moves_schedulers: whether learning rates follow their schedulers.
    """

    code: str
    name: str
    run_id: int
    spec: TrainSpec
    evaluation: EvalRequest | None = None
    steps_left: int | None = None
    moves_schedulers: bool = True


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
    | SetAsideRequest
    | RoomRequest
    | HoldRequest
    | CompareRequest
    | PutBackRequest
)
