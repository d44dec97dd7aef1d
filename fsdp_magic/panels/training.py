"""The live panel of a training run, from its first frame to the one that stays; pure.

Every frame of a run has the same rows at the same height: one line of state, a progress bar,
figures, the chart, a bar per rank; notes come beneath, and at the end where ranks wait for each
other. A panel grows for that table once: when the ranks go on it stays there, faded, until the
run ends, because what stands beneath on the page would jump at every wait. While the run is under
way the bars show memory now; the last frame shows memory at its peak and mean activity. So that
nothing jumps, what a line breaks into depends on the width of the page, never on what stands in
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.core.telemetry import RunState
from fsdp_magic.core.units import UNKNOWN, count_text, seconds_text
from fsdp_magic.panels import evaluation, loss_chart, rank_memory, waiting
from fsdp_magic.panels.figures import Figure, figures_html, figures_text, loss_figure
from fsdp_magic.panels.gauges import Gauge
from fsdp_magic.panels.loss_chart import LossChart
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
    muted,
    notes_html,
    notes_text,
    shortened,
)
from fsdp_magic.panels.training_view import TrainingView

STATES: dict[RunState, tuple[str, str, str]] = {
    "starting": ("○", "Starting", GREY),
    "running": ("●", "Running", BLUE),
    "done": ("✓", "Done", GREEN),
    "stopped": ("■", "Stopped", ORANGE),
    "failed": ("✕", "Failed", RED),
}
"""Sign, word and colour of each state."""
_STOPPING = "stopping after this step; press again to stop at once"


def html(view: TrainingView) -> str:
    """Return a frame as HTML."""
    content = (
        _headline(view)
        + _progress_bar(view)
        + "".join(figures_html(row) for row in _rows(view))
        + loss_chart.html(_chart(view), as_image=view.is_last)
        + rank_memory.html(_gauges(view), at_peak=view.is_last)
        + notes_html(view.notes)
        + _waiting(view)
    )
    return card(content, label=f"Training run: {STATES[view.state][1]}")


def text(view: TrainingView) -> str:
    """Return a frame as text; its first line tells of the run by itself, in a log."""
    sign, word, _ = STATES[view.state]
    first, *rest = _rows(view)
    head = f"{sign} {word}{view.percentage}  step {_step_text(view)}  {figures_text(first[:3])}"
    if view.waiting is not None:
        head += f"  {waiting.summary(view.waiting)}"
    return "\n".join(
        [
            head,
            f"{_beside(view)}  {shortened(view.stamp, 20)}",
            figures_text(first[3:]),
            *map(figures_text, rest),
            loss_chart.text(_chart(view)),
            *rank_memory.text(_gauges(view), at_peak=view.is_last),
            *notes_text(view.notes),
            *([] if view.waiting is None else [waiting.text(view.waiting)]),
        ]
    )


def _waiting(view: TrainingView) -> str:
    """Return the table of ranks that wait for each other, or the last one, faded."""
    if view.waiting is not None:
        return waiting.html(view.waiting)
    if view.waited is None or view.is_last:
        return ""
    return waiting.html(view.waited, is_over=True)


def batch_text(view: TrainingView) -> str:
    """Return how a step's samples come about: ``8 × 4 × 2 ranks = 64 samples a step``."""
    ranks = f"{view.data_parallel_size} rank{'s' if view.data_parallel_size != 1 else ''}"
    if view.micro_batch_size is None:
        known = view.samples_per_step is not None
        return f"{ranks}, {view.samples_per_step:,} samples a step" if known else ranks
    product = view.micro_batch_size * view.accumulate * view.data_parallel_size
    samples_per_step = product if view.samples_per_step is None else view.samples_per_step
    relation = " =" if samples_per_step == product else ","
    factors = f"{view.micro_batch_size} × {view.accumulate} × {ranks}"
    return f"{factors}{relation} {samples_per_step:,} samples a step"


def _chart(view: TrainingView) -> LossChart:
    return LossChart(
        losses=view.losses,
        first_step=view.first_step,
        total_steps=view.total_steps,
        is_last=view.is_last,
    )


# ---------------------------------------------------------------- head


def _headline(view: TrainingView) -> str:
    """Return state and step, then why it failed and how its samples come about, then the time."""
    sign, word, colour = STATES[view.state]
    beside = escape(_beside(view))
    tip = "micro-batch size × accumulation steps × data-parallel size"
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:0px 12px;white-space:nowrap">'
        f'<div style="display:flex;flex:0 0 auto;min-width:270px;gap:0px 12px;{NUMBERS}">'
        f'<b style="min-width:112px">{icon(sign, colour)} {word}{view.percentage} </b>'
        f"<span>{muted('step')} <b>{_step_text(view)} </b></span></div>"
        f'<div style="display:flex;flex:1 1 310px;min-width:0;gap:0px 12px;{NUMBERS}">'
        f'<span title="{beside} ({tip})" style="flex:1 1 0%;min-width:0;overflow:hidden;'
        f'text-overflow:ellipsis;opacity:.7">{beside} </span>'
        f'<span style="flex:none;{SMALL}">{escape(shortened(view.stamp, 20))} </span></div></div>'
    )


def _beside(view: TrainingView) -> str:
    """Return what stands beside the state."""
    message = shortened(view.message, 300)
    if view.is_stopping and not view.is_last:
        message = _STOPPING
    return f"{message} · {batch_text(view)}" if message else batch_text(view)


def _step_text(view: TrainingView) -> str:
    total = UNKNOWN if view.total_steps is None else f"{view.first_step + view.total_steps:,}"
    return f"{view.first_step + view.steps:,}/{total}"


def _progress_bar(view: TrainingView) -> str:
    """Return the bar; faint where the end is not known."""
    colour = STATES[view.state][2]
    width, opacity = (100.0, 0.35) if view.progress is None else (100 * view.progress, 1.0)
    if view.state == "starting":
        width = 0.0
    now = "" if view.progress is None else f' aria-valuenow="{round(100 * view.progress)}"'
    return (
        f'<div role="progressbar" aria-label="steps of this run"{now} '
        f'aria-valuetext="step {_step_text(view)}" style="height:6px;margin:4px 0px 8px 0px;'
        f'background:{TRACK};border-radius:3px;overflow:hidden"><div style="height:6px;'
        f'width:{width:.2f}%;opacity:{opacity};background:{colour}"></div></div>'
    )


# ---------------------------------------------------------------- figures


def _rows(view: TrainingView) -> list[Sequence[Figure]]:
    """Return the rows of figures: the run's own, metrics, the newest evaluation."""
    rows: list[Sequence[Figure]] = [_figures(view)]
    if view.metrics or view.binds_metrics:
        known = [loss_figure(name, value) for name, value in view.metrics.items()]
        rows.append(known or [Figure(name="metrics", value=UNKNOWN)])
    if view.evaluates:
        rows.append(evaluation.newest_figures(view.evaluation))
    return rows


def _figures(view: TrainingView) -> list[Figure]:
    """Return the figures of the run, always as many in the same places."""
    if view.tokens_per_second is None:
        rate = ("samples/s", count_text(view.samples_per_second))
    else:
        rate = ("tokens/s", count_text(view.tokens_per_second))
    if view.is_last:
        ahead = ("lowest loss", figure_text(view.losses.lowest))
    else:
        ahead = ("ETA", seconds_text(view.eta_seconds))
    rest = [
        rate,
        ahead,
        ("elapsed", seconds_text(view.seconds)),
        ("ms/step", _milliseconds_text(view)),
        ("gradient norm", figure_text(view.grad_norm)),
        ("learning rate", figure_text(view.learning_rate)),
    ]
    loss = loss_figure("loss", view.losses.last)
    return [loss, *(Figure(name=name, value=value) for name, value in rest)]


def _milliseconds_text(view: TrainingView) -> str:
    """Return the time of a step, over the same stretch as the rate beside it if there is one."""
    if view.samples_per_second and view.samples_per_step:
        return f"{1000 * view.samples_per_step / view.samples_per_second:,.0f}"
    return f"{1000 * view.seconds / view.steps:,.0f}" if view.steps else UNKNOWN


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
            peak_bytes=rank.peak_used_bytes,
            activity=rank.activity,
        )
        for rank in view.ranks
    ]
