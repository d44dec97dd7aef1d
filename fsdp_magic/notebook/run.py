"""KERNEL: a training run as a person holds it: its history and how it ended.

Each rank reports its share of every step's loss; the shares of all ranks add up to the loss of
the global batch. So a step counts here once every rank has reported it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp_magic.core.errors import CellFailedError
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import (
    EvaluationRecord,
    ProgressReport,
    RunReport,
    RunState,
    SkippedSteps,
)
from fsdp_magic.notebook import display
from fsdp_magic.notebook.rank_progress import RankProgress
from fsdp_magic.panels.waiting import WaitingView


class Run:
    """One training run.

    Attributes:
        run_id: counts from 1 in a session.
        world_size: ranks it ran on.
        state: ``starting``, ``running``, ``done``, ``stopped`` or ``failed``.
        total_steps: steps it was to take; None if that was not known.
        first_step: ``step`` of its first step, which counts on over the runs of a model.
        began: whether the ranks were ready to take steps.
        learning_rate: the newest, of the first group of the first optimizer; None: not known.
        epochs_ended: how many ends of epochs it has passed.
        seconds: since its first step began.
        evaluations: those of ``--eval-every``.
        non_finite_steps: the first steps whose loss was not finite.
        skipped: steps that the fp16 scaler skipped; None: none.
        notes: sentences a person should read.
        message: why it failed, in one line.
        waiting, waited: where the ranks are while they wait for each other, None: they move; and
            where they last were so.
        is_stopping: whether the person has asked for its end.
        last_frame: the panel that stays, as HTML and as text; None while it runs.
    """

    def __init__(self, *, run_id: int, world_size: int, accumulate: int) -> None:
        self.run_id = run_id
        self.world_size = world_size
        self.accumulate = accumulate
        self.state: RunState = "starting"
        self.total_steps: int | None = None
        self.micro_batch_size: int | None = None
        self.has_losses = True
        self.evaluations: list[EvaluationRecord] = []
        self.non_finite_steps: list[int] = []
        self.skipped: SkippedSteps | None = None
        self.notes: list[str] = []
        self.message = ""
        self.last_frame: tuple[str, str] | None = None
        self.waiting: WaitingView | None = None
        self.waited: WaitingView | None = None
        self.is_stopping = False
        self.first_step = 0
        self.began = False
        self.epochs_ended = 0
        self.learning_rate: float | None = None
        self.ranks = [RankProgress() for _ in range(world_size)]
        self._losses: list[float] = []

    # -- history

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank has finished."""
        return min(len(rank.losses) for rank in self.ranks)

    @property
    def losses(self) -> list[float]:
        """The loss of the global batch, one per step; none if the cell never bound one."""
        return self.losses_from(0)

    def losses_from(self, index: int) -> list[float]:
        """Return the losses of the steps from an index on, which a panel has not drawn yet."""
        if not self.has_losses:
            return []
        known = len(self._losses)
        shares = zip(*(rank.losses[known:] for rank in self.ranks), strict=False)
        self._losses += [sum(share) for share in shares]
        return self._losses[index:]

    @property
    def metrics(self) -> dict[str, list[float]]:
        """The metrics of the global batch by name, one value per step; NaN where none was bound."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.metrics)
        return {name: [self.metric(name, step) for step in range(self.steps)] for name in names}

    def metric(self, name: str, step: int) -> float:
        """Return a metric of one step, counted from the run's first; NaN if none was bound."""
        parts = [rank.metrics.get(name, {}).get(step, (0.0, 0.0)) for rank in self.ranks]
        weight = sum(weight for _, weight in parts)
        return sum(total for total, _ in parts) / weight if weight else math.nan

    @property
    def newest_metrics(self) -> dict[str, float]:
        """Each metric's value of the last step that bound it."""
        newest: dict[str, float] = {}
        for name in dict.fromkeys(name for rank in self.ranks for name in rank.metrics):
            step = max(rank.newest_step(name, before=self.steps) for rank in self.ranks)
            if step >= 0:
                newest[name] = self.metric(name, step)
        return newest

    def values(self, step: int) -> dict[str, float]:
        """Return the numbers of one step by name, as ``--log`` hands them on."""
        values = {"loss": sum(rank.losses[step] for rank in self.ranks)} if self.has_losses else {}
        norm = self.ranks[0].grad_norms[step]
        if not math.isnan(norm) or self.has_losses:
            values["grad_norm"] = norm
        names = dict.fromkeys(
            n for rank in self.ranks for n, at in rank.metrics.items() if step in at
        )
        return {**values, **{name: self.metric(name, step) for name in names}}

    @property
    def samples_per_step(self) -> int | None:
        """Samples of all ranks in the first step; None where batches have none."""
        if not self.steps:
            return None
        return sum(rank.samples[0] for rank in self.ranks) or None

    @property
    def grad_norms(self) -> list[float]:
        """The norm of the whole gradient before clipping, one per step."""
        return self.ranks[0].grad_norms[: self.steps]

    @property
    def seconds(self) -> float:
        """Seconds since the first step began, on the slowest rank."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks over the time of the run."""
        return self._per_second(sum(rank.sample_count for rank in self.ranks))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all ranks over the time of the run; None where batches have none."""
        counts = [rank.token_count for rank in self.ranks]
        if any(not count for count in counts):
            return None
        return self._per_second(sum(count or 0 for count in counts))

    @property
    def peak_bytes(self) -> list[int | None]:
        """The most that was allocated, by rank."""
        return [
            None if rank.peak_memory is None else rank.peak_memory.peak_allocated_bytes
            for rank in self.ranks
        ]

    def _per_second(self, count: int) -> float | None:
        return count / self.seconds if self.seconds > 0 and count else None

    # -- what arrives

    def add(self, report: ProgressReport) -> None:
        """Take a rank's progress; a report of another run came late and is dropped."""
        if report.run_id != self.run_id or self.state not in ("starting", "running"):
            return
        self.state = "running"
        self.total_steps = report.total_steps
        rank = self.ranks[report.rank]
        rank.add(report.records)
        rank.seconds, rank.device_name = report.seconds, report.device_name
        rank.memory, rank.peak_memory = report.memory, report.peak_memory
        rank.activity = report.activity
        self._note(report.notes)
        self._take_sizes(report)

    def finish(self, reports: Sequence[RunReport]) -> None:
        """Take the ranks' last reports, which hold the whole history."""
        self._losses.clear()
        for report in reports:
            rank = self.ranks[report.rank]
            rank.add(report.records)
            rank.seconds, rank.device_name = report.seconds, report.device_name
            rank.memory, rank.peak_memory = report.memory, report.peak_memory
            rank.mean_activity = report.mean_activity
            self.total_steps = report.total_steps
            self._take_sizes(report)
            self._note(report.notes)
            self.epochs_ended = report.epochs_ended
        if len(reports) == self.world_size:
            self.state = "stopped" if any(report.stopped for report in reports) else "done"

    def wait(self, view: WaitingView | None) -> None:
        """Note where the ranks are that wait for each other; None: they move."""
        self.waiting, self.waited = view, view or self.waited

    def fail(self, error: BaseException, spec: TrainSpec) -> None:
        """Note why the run ended early, and tell in the error how it can go on.

        Args:
            error: what ended it.
            spec: the options it was started with.
        """
        left = 0 if self.total_steps is None or spec.trial else self.total_steps - self.steps
        more = f"; --resume takes the other {left:,}" if left > 0 else ""
        after = f"after step {self.first_step + self.steps:,}{more}."
        if isinstance(error, KeyboardInterrupt):
            self.state = "stopped"
            torn = getattr(error, "torn", "")
            error.args = (f"Training stopped {after}\n{torn}".rstrip(),)
            return
        if isinstance(error, CellFailedError) and self._kept_by(error, spec):
            error.add_line(f"Nothing is lost: the weights are those {after}")
        self.state = "failed"
        self.message = _in_a_line(error)

    def _kept_by(self, error: CellFailedError, spec: TrainSpec) -> bool:
        """Return whether a failure left the weights of the last whole step.

        A manual cell that fails may have stepped an optimizer itself.
        """
        touched = spec.manual or spec.trial or error.is_torn
        return self.began and not touched and not error.is_refusal

    def _take_sizes(self, report: ProgressReport | RunReport) -> None:
        self.began = True
        self.first_step = report.first_step
        self.micro_batch_size = report.micro_batch_size or self.micro_batch_size
        self.accumulate = report.accumulate
        self.has_losses = report.has_losses or report.steps == 0
        self.learning_rate = report.learning_rate
        self.skipped = report.skipped or self.skipped
        if len(report.evaluations) > len(self.evaluations):  # ranks report at different times
            self.evaluations = list(report.evaluations)
        if report.non_finite_steps:
            known = set(self.non_finite_steps) | set(report.non_finite_steps)
            self.non_finite_steps = sorted(known)

    def _note(self, notes: Sequence[str]) -> None:
        self.notes.extend(note for note in notes if note not in self.notes)

    def show(self) -> None:
        """Show the panel that stayed of it."""
        if self.last_frame is not None:
            display.show(*self.last_frame)
            display.mark_shown(self)
        else:
            display.write("stdout", f"{self!r}\n")

    def _ipython_display_(self) -> None:
        """Show the panel where a cell ends in the run, unless the cell has just drawn it."""
        if not display.is_shown(self):
            self.show()

    def __repr__(self) -> str:
        losses = self.losses
        loss = f", loss {losses[0]:.4g} → {losses[-1]:.4g}" if losses else ""
        return (
            f"<Run {self.run_id}: {self.state}, {self.steps:,} steps{loss}, {self.seconds:.1f} s>"
        )


def _in_a_line(error: BaseException) -> str:
    """Return why a run failed, for its panel; the error beneath says it at length."""
    if summary := getattr(error, "summary", ""):
        return str(summary)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
