"""What ranks report of their memory, their device and the steps of a run; data only, pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RunState = Literal["starting", "running", "done", "stopped", "failed"]


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
class MetricRecord:
    """One rank's part of a metric in one step: the ranks' totals over their weights are its value.

    Attributes:
        name: of the metric.
        step: index in the run.
        total: weight × value, added up over micro-batches.
        weight: added up likewise.
    """

    name: str
    step: int
    total: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The result of an evaluation, the same on every rank.

    Attributes:
        step: optimizer steps done when it was made.
        loss: over all samples; None: the cell bound none.
        metrics: likewise, by name.
        samples: how many there were.
    """

    step: int
    loss: float | None
    metrics: dict[str, float]
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords:
    """Numbers of consecutive steps on one rank; the kernel adds the ranks up.

    Attributes:
        first: index in the run of the first step in here.
        losses: this rank's share of the global loss of each step: the shares of all ranks
            add up to it. NaN where a cell bound none.
        grad_norms: global gradient norm of each step, before clipping. NaN where no optimizer
            stepped.
        samples: samples this rank took in each step.
        tokens: tokens this rank took in each step; None where batches have none.
        metrics: this rank's parts, of the steps in which the cell bound them.
    """

    first: int = 0
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] | None = None
    metrics: tuple[MetricRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSteps:
    """Steps of a run whose gradients were not finite in fp16, so that no optimizer stepped.

    Attributes:
        count: how many.
        scale: what the loss is multiplied by since the last of them.
    """

    count: int
    scale: float


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
        micro_batch_size: samples of this rank in one micro-step.
        accumulate: micro-steps in one step.
        has_losses: whether the cell ever bound a loss.
        evaluations: made so far in the run.
        non_finite_steps: the first few whose loss was not finite on this rank.
        skipped: by the fp16 scaler, so far; None: none.
        learning_rate: of the first optimizer's first group; None: not a plain number.
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
    micro_batch_size: int | None
    accumulate: int = 1
    has_losses: bool = True
    evaluations: tuple[EvaluationRecord, ...] = ()
    non_finite_steps: tuple[int, ...] = ()
    skipped: SkippedSteps | None = None
    learning_rate: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """How a training run ended on one rank.

    Attributes:
        records: every step of the run.
        stopped: whether it ended at the person's wish before its last step.
        mean_activity: the device's mean over the run.
        epochs_ended: how many ends of epochs it has passed.
        accumulate, has_losses, evaluations, non_finite_steps, skipped, learning_rate: as in
            ``ProgressReport``.
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
    micro_batch_size: int | None
    accumulate: int = 1
    has_losses: bool = True
    evaluations: tuple[EvaluationRecord, ...] = ()
    epochs_ended: int = 0
    non_finite_steps: tuple[int, ...] = ()
    skipped: SkippedSteps | None = None
    learning_rate: float | None = None
    notes: tuple[str, ...] = ()
