"""The live panel of a training run, from its first frame to the one that stays; pure.

Every frame of a run has the same rows at the same height: one line of state, a progress bar,
figures, the chart, a bar per rank, a last line. While the run is under way the bars show
memory now; the last frame shows memory at its peak and mean activity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_magic.core.telemetry import DeviceSample, EvaluationRecord, MemorySample, RunState
from fsdp_magic.core.units import UNKNOWN, bytes_text, count_text, seconds_text
from fsdp_magic.panels import evaluation, loss_chart, rank_memory
from fsdp_magic.panels.gauges import UNKNOWN_ACTIVITY, Gauge
from fsdp_magic.panels.loss_chart import LossHistory
from fsdp_magic.panels.parts import (
    BLUE,
    GREEN,
    GREY,
    NUMBERS,
    ORANGE,
    RED,
    SMALL,
    TRACK,
    card,
    escape,
    figure_text,
    icon,
    notes_html,
    one_line,
    percent_text,
)

STATES: dict[RunState, tuple[str, str, str]] = {
    "starting": ("○", "Starting", GREY),
    "running": ("●", "Running", BLUE),
    "done": ("✓", "Done", GREEN),
    "stopped": ("■", "Stopped", ORANGE),
    "failed": ("✕", "Failed", RED),
}
"""Sign, word and colour of each state."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """One frame.

    Attributes:
        steps: optimizer steps finished in this run.
        total_steps: steps the run will take; None: not known.
        first_step: steps done before this run.
        micro_batch_size: samples per rank per forward; None: no data, or not known yet.
        samples_per_step: of all ranks; None: what the three factors give.
        losses: global, one per finished step; may hold nan and infinities.
        grad_norm: of the last step, before clipping.
        ranks: every rank, from the first frame on, so that the panel keeps its height.
        stamp: when the frame was made, as text.
        message: one line, such as why the run stopped.
        notes: sentences beneath.
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
    losses: Sequence[float]
    grad_norm: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    seconds: float
    eta_seconds: float | None
    ranks: tuple[RankView, ...]
    stamp: str
    first_step: int = 0
    message: str = ""
    notes: tuple[str, ...] = ()
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


def html(view: TrainingView) -> str:
    """Return a frame as HTML."""
    word = STATES[view.state][1]
    chart = loss_chart.html(_history(view), as_image=view.is_last)
    content = (
        _headline(view)
        + _progress_bar(view)
        + _figures_html(view)
        + _more_html(view)
        + chart
        + rank_memory.html(_gauges(view), at_peak=view.is_last)
        + _last_line(view)
        + notes_html(view.notes)
    )
    return card(content, label=f"Training run: {word}")


def text(view: TrainingView) -> str:
    """Return a frame as text."""
    sign, word, _ = STATES[view.state]
    figures = [f"{name} {value}" for name, value in _figures(view)]
    return "\n".join(
        [
            f"{sign} {word}{view.percentage}  {batch_text(view)}",
            "  ".join(figures[:4]),
            "  ".join(figures[4:]),
            *_more(view),
            loss_chart.text(_history(view)),
            *rank_memory.text(_gauges(view), at_peak=view.is_last),
            f"{one_line(view.stamp)}  {one_line(view.message)}".rstrip(),
            *(one_line(note) for note in view.notes),
        ]
    )


def batch_text(view: TrainingView) -> str:
    """Return how a step's samples come about: ``8 × 4 × 2 ranks = 64 samples a step``."""
    ranks = f"{view.data_parallel_size} rank{'s' if view.data_parallel_size != 1 else ''}"
    if view.micro_batch_size is None:
        samples = UNKNOWN if view.samples_per_step is None else f"{view.samples_per_step:,}"
        return f"{ranks}, samples a step {samples}"
    product = view.micro_batch_size * view.accumulate * view.data_parallel_size
    samples_per_step = product if view.samples_per_step is None else view.samples_per_step
    relation = " =" if samples_per_step == product else ","
    factors = f"{view.micro_batch_size} × {view.accumulate} × {ranks}"
    return f"{factors}{relation} {samples_per_step:,} samples a step"


def _history(view: TrainingView) -> LossHistory:
    return LossHistory(losses=view.losses, first_step=view.first_step, total_steps=view.total_steps)


# ---------------------------------------------------------------- head


def _headline(view: TrainingView) -> str:
    sign, word, colour = STATES[view.state]
    tip = "micro-batch size × accumulation steps × data-parallel size"
    return (
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0px 16px">'
        f'<b style="white-space:nowrap;{NUMBERS}">{icon(sign, colour)} {word}{view.percentage} </b>'
        f'<span title="{tip}" style="white-space:nowrap;opacity:.7;{NUMBERS}">'
        f"{escape(batch_text(view))} </span></div>"
    )


def _progress_bar(view: TrainingView) -> str:
    """Return the bar; faint where the end is not known."""
    colour = STATES[view.state][2]
    width, opacity = (100.0, 0.35) if view.progress is None else (100 * view.progress, 1.0)
    if view.state == "starting":
        width = 0.0
    last = view.total_steps or max(view.steps, 1)
    return (
        f'<div role="progressbar" aria-label="steps of this run" aria-valuemin="0" '
        f'aria-valuemax="{last}" aria-valuenow="{view.steps}" style="height:6px;margin:4px 0 8px 0;'
        f'background:{TRACK};border-radius:3px;overflow:hidden"><div style="height:6px;'
        f'width:{width:.2f}%;opacity:{opacity};background:{colour}"></div></div>'
    )


def _figures(view: TrainingView) -> list[tuple[str, str]]:
    """Return the names and values of the figures, always the same ones in the same places."""
    total = UNKNOWN if view.total_steps is None else f"{view.first_step + view.total_steps:,}"
    if view.tokens_per_second is None:
        rate = ("samples/s", count_text(view.samples_per_second))
    else:
        rate = ("tokens/s", count_text(view.tokens_per_second))
    return [
        ("step", f"{view.first_step + view.steps:,}/{total}"),
        ("loss", figure_text(view.losses[-1] if view.losses else None)),
        ("gradient norm", figure_text(view.grad_norm)),
        rate,
        ("ms/step", _milliseconds_text(view)),
        ("elapsed", seconds_text(view.seconds)),
        ("ETA", "–" if view.is_last else seconds_text(view.eta_seconds)),
        ("peak used", bytes_text(_peak_bytes(view))),
    ]


def _peak_bytes(view: TrainingView) -> int | None:
    """Return the used bytes of the fullest rank at its peak."""
    peaks = [_peak_used_bytes(rank) for rank in view.ranks]
    return max((peak for peak in peaks if peak is not None), default=None)


def _peak_used_bytes(rank: RankView) -> int | None:
    """Return the most that is known to have been used: then, or now if the cache has grown."""
    samples = [sample.used_bytes for sample in (rank.peak_memory, rank.memory) if sample]
    return max(samples, default=None) if rank.peak_memory else None


def _milliseconds_text(view: TrainingView) -> str:
    """Return the time of a step, over the same stretch as the rate beside it if there is one."""
    if view.samples_per_second and view.samples_per_step:
        return f"{1000 * view.samples_per_step / view.samples_per_second:,.0f}"
    return f"{1000 * view.seconds / view.steps:,.0f}" if view.steps else UNKNOWN


def _figures_html(view: TrainingView) -> str:
    broken = bool(view.losses) and not math.isfinite(view.losses[-1])
    warning = f";color:{RED}" if broken else ""
    tiles = "".join(
        '<div style="flex:1 1 78px;white-space:nowrap">'
        f'<div style="{SMALL};line-height:15px">{name} </div>'
        f'<b style="{NUMBERS}{warning if name == "loss" else ""}">{value} </b></div>'
        for name, value in _figures(view)
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 8px">{tiles}</div>'


def _more(view: TrainingView) -> list[str]:
    return evaluation.training_lines(view.metrics, evaluates=view.evaluates, newest=view.evaluation)


def _more_html(view: TrainingView) -> str:
    return "".join(
        f'<div style="margin-top:2px;{NUMBERS}">{escape(line)} </div>' for line in _more(view)
    )


def _last_line(view: TrainingView) -> str:
    sign, _, colour = STATES[view.state]
    message = f"{icon(sign, colour)} {escape(one_line(view.message))}" if view.message else ""
    return (
        '<div style="display:flex;justify-content:space-between;gap:12px;margin-top:6px;'
        f'min-height:19px"><span>{message} </span>'
        f'<span style="white-space:nowrap;{SMALL};{NUMBERS}">{escape(view.stamp)}</span></div>'
    )


def _gauges(view: TrainingView) -> list[Gauge]:
    """Return what each rank's bar shows in this frame."""
    if view.is_last:
        return [
            Gauge(
                rank=rank.rank,
                device_name=rank.device_name,
                memory=rank.peak_memory or rank.memory,
                peak_bytes=None,
                activity=rank.mean_activity,
            )
            for rank in view.ranks
        ]
    return [
        Gauge(
            rank=rank.rank,
            device_name=rank.device_name,
            memory=rank.memory,
            peak_bytes=_peak_used_bytes(rank),
            activity=rank.activity,
        )
        for rank in view.ranks
    ]
