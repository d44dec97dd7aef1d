"""What an evaluation found: loss, metrics, how much was collected; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.core.units import UNKNOWN, seconds_text
from fsdp_magic.panels.figures import Figure, figures_html, figures_text, loss_figure
from fsdp_magic.panels.parts import (
    NUMBERS,
    SMALL,
    card,
    escape,
    headline,
    notes_html,
    notes_text,
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
    figures = _figures(view)
    content = (
        headline(_heading(view), stamp=view.stamp)
        + (figures_html(figures) if figures else "")
        + f'<div style="margin-top:6px;{SMALL};{NUMBERS}">{escape(_size(view))} </div>'
        + notes_html(view.notes)
    )
    return card(content, label="Evaluation")


def text(view: EvaluationView) -> str:
    """Return the same as text."""
    head = f"{_heading(view)}  {one_line(view.stamp)}"
    lines = [head, figures_text(_figures(view)), _size(view)]
    return "\n".join([*filter(None, lines), *notes_text(view.notes)])


def newest_figures(newest: EvaluationRecord | None) -> list[Figure]:
    """Return the newest evaluation for the panel of a run that makes some.

    Args:
        newest: None: none is there yet; its place is kept.
    """
    if newest is None:
        return [Figure(name="evaluated at step", value=UNKNOWN)]
    values = ({} if newest.loss is None else {"loss": newest.loss}) | newest.metrics
    step = Figure(name="evaluated at step", value=f"{newest.step:,}")
    return [step, *(loss_figure(f"eval {name}", value) for name, value in values.items())]


def _heading(view: EvaluationView) -> str:
    return f"Evaluation after step {view.step:,}"


def _figures(view: EvaluationView) -> list[Figure]:
    values = ({} if view.loss is None else {"loss": view.loss}) | dict(view.metrics)
    return [loss_figure(name, value) for name, value in values.items()]


def _size(view: EvaluationView) -> str:
    """Return how much was read and collected: ``13 samples, 0.4 s, collected label: 13 rows``."""
    many = "s" if view.samples != 1 else ""
    parts = [f"{view.samples:,} sample{many}"] if view.samples else []
    short = view.seconds < 60
    parts.append(f"{view.seconds:.1f} s" if short else seconds_text(view.seconds))
    names_by_rows: dict[int, list[str]] = {}
    for name, rows in view.rows.items():
        names_by_rows.setdefault(rows, []).append(shortened(name, 40))
    for rows, names in names_by_rows.items():
        parts.append(f"collected {', '.join(names)}: {rows:,} row{'s' if rows != 1 else ''}")
    return " · ".join(parts)
