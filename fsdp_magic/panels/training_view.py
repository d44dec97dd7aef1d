"""A frame of the training panel as a record; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_magic.core.telemetry import DeviceSample, EvaluationRecord, MemorySample, RunState
from fsdp_magic.panels.gauges import UNKNOWN_ACTIVITY
from fsdp_magic.panels.loss_history import LossHistory
from fsdp_magic.panels.parts import percent_text
from fsdp_magic.panels.waiting import WaitingView


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank in a frame.

    Attributes:
        memory: now; None: not known yet.
        peak_memory: at the moment of the highest allocation so far.
        activity, mean_activity: of its device, now and over the run.
    """

    rank: int
    device_name: str
    memory: MemorySample | None
    peak_memory: MemorySample | None
    activity: DeviceSample = UNKNOWN_ACTIVITY
    mean_activity: DeviceSample = UNKNOWN_ACTIVITY

    @property
    def peak_used_bytes(self) -> int | None:
        """The most that is known to have been used: then, or now if the cache has grown."""
        samples = [sample.used_bytes for sample in (self.peak_memory, self.memory) if sample]
        return max(samples, default=None) if self.peak_memory else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """One frame.

    Attributes:
        steps: optimizer steps finished in this run.
        total_steps: steps the run will take; None: not known.
        first_step: steps done before this run.
        micro_batch_size: samples per rank per forward; None: no data, or not known yet.
        samples_per_step: of all ranks; None: what the three factors give.
        losses: global, one per finished step.
        grad_norm: of the last step, before clipping.
        learning_rate: of the first optimizer's first group; None: not known.
        ranks: every rank, from the first frame on, so that the panel keeps its height.
        stamp: when the frame was made, as text.
        message: one line, such as why the run failed.
        is_stopping: whether the person has asked for its end, which it has not reached yet.
        notes: sentences beneath.
        waiting: where the ranks are while they wait for each other; None: they move.
        waited: where they were when they last did so, in this run; None: they never did.
        binds_metrics: whether the cell is expected to bind metrics: their place is kept.
        metrics: newest values, by name.
        evaluates: whether the run makes evaluations.
        evaluation: the newest.
    """

    state: RunState
    steps: int
    total_steps: int | None
    micro_batch_size: int | None
    accumulate: int
    data_parallel_size: int
    samples_per_step: int | None
    losses: LossHistory
    grad_norm: float | None
    learning_rate: float | None = None
    samples_per_second: float | None
    tokens_per_second: float | None
    seconds: float
    eta_seconds: float | None
    ranks: tuple[RankView, ...]
    stamp: str
    first_step: int = 0
    message: str = ""
    is_stopping: bool = False
    notes: tuple[str, ...] = ()
    waiting: WaitingView | None = None
    waited: WaitingView | None = None
    binds_metrics: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluates: bool = False
    evaluation: EvaluationRecord | None = None

    @property
    def is_last(self) -> bool:
        """Whether this frame stays in the notebook."""
        return self.state in ("done", "stopped", "failed")

    @property
    def percentage(self) -> str:
        """The progress as text; of a run that its cell ended early, nothing: it is done."""
        if self.progress is None or (self.state == "done" and self.progress < 1):
            return ""
        return f" {percent_text(100 * self.progress)}"

    @property
    def progress(self) -> float | None:
        """The part of this run that is done, 0 to 1; None: not known."""
        if self.state == "done" and (self.total_steps is None or self.steps >= self.total_steps):
            return 1.0
        if self.state == "starting":
            return None
        return min(1.0, self.steps / self.total_steps) if self.total_steps else None
