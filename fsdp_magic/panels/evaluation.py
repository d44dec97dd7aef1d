"""What an evaluation found: loss, metrics, how much was collected; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.core.units import seconds_text
from fsdp_magic.panels.parts import (
    NUMBERS,
    SMALL,
    card,
    escape,
    figure_text,
    notes_html,
    one_line,
    shortened,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationView:
    """An evaluation as it is shown.

    Attributes:
        step: optimizer steps done when it was made.
        loss: over all samples; None: the cell bound none.
        metrics: likewise, by name.
        samples: how many there were; 0 where batches have no number of samples.
        seconds: it took.
        rows: number of rows collected, by name.
        notes: sentences a person should read.
        stamp: when it ended, as text.
    """

    step: int
    loss: float | None
    metrics: Mapping[str, float]
    samples: int
    seconds: float
    rows: Mapping[str, int]
    notes: tuple[str, ...]
    stamp: str


def html(view: EvaluationView) -> str:
    """Return it as HTML."""
    tiles = "".join(
        '<div style="flex:0 1 auto;min-width:78px">'
        f'<div style="{SMALL};line-height:15px">{escape(name)} </div>'
        f'<b style="{NUMBERS}">{escape(value)} </b></div>'
        for name, value in _figures(view)
    )
    content = (
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0px 16px;'
        f'margin-bottom:4px"><b>{escape(_heading(view))} </b>'
        f'<span style="{SMALL};{NUMBERS}">{escape(view.stamp)} </span></div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 20px">{tiles}</div>'
        + notes_html(view.notes)
    )
    return card(content, label="Evaluation")


def text(view: EvaluationView) -> str:
    """Return the same as text."""
    figures = [f"{name} {value}" for name, value in _figures(view)]
    lines = [f"{_heading(view)}  {one_line(view.stamp)}", "  ".join(figures)]
    return "\n".join([*lines, *(one_line(note) for note in view.notes)])


def training_lines(
    metrics: Mapping[str, float], *, evaluates: bool, newest: EvaluationRecord | None
) -> list[str]:
    """Return the lines of a training panel that only some runs have.

    A run that evaluates has its line from the first frame on, so that nothing jumps.
    """
    lines = [metrics_text(metrics)] if metrics else []
    if not evaluates:
        return lines
    if newest is None:
        return [*lines, "evaluation: none yet"]
    loss = {} if newest.loss is None else {"loss": newest.loss}
    found = metrics_text({**loss, **newest.metrics})
    return [*lines, f"evaluation after step {newest.step:,}: {found}"]


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return metrics on one line: ``accuracy 0.93  f1 0.88``."""
    return "  ".join(f"{shortened(n, 40)} {figure_text(value)}" for n, value in metrics.items())


def _heading(view: EvaluationView) -> str:
    return f"Evaluation after step {view.step:,}"


def _figures(view: EvaluationView) -> list[tuple[str, str]]:
    figures = [] if view.loss is None else [("loss", figure_text(view.loss))]
    figures += [(shortened(name, 40), figure_text(value)) for name, value in view.metrics.items()]
    figures += [("samples", f"{view.samples:,}")] if view.samples else []
    figures.append(("time", seconds_text(view.seconds)))
    figures += [
        (f"collected {shortened(n, 40)}", f"{rows:,} rows") for n, rows in view.rows.items()
    ]
    return figures
