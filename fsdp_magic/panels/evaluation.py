"""What an evaluation found: loss, metrics, how much was collected; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.core.units import seconds_text
from fsdp_magic.panels.parts import (
    NUMBERS,
    RED,
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
        '<div style="flex:0 1 auto;min-width:78px;white-space:nowrap">'
        f'<div style="{SMALL};line-height:15px">{escape(name)} </div>'
        f'<b style="{NUMBERS}{_warning(value)}">{figure_text(value)} </b></div>'
        for name, value in _figures(view)
    )
    content = (
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0px 16px;'
        f'margin-bottom:4px"><b>{escape(_heading(view))} </b>'
        f'<span style="{SMALL};{NUMBERS}">{escape(one_line(view.stamp))} </span></div>'
        + (f'<div style="display:flex;flex-wrap:wrap;gap:4px 24px">{tiles}</div>' if tiles else "")
        + f'<div style="margin-top:6px;{SMALL};{NUMBERS}">{escape(_size(view))} </div>'
        + notes_html(view.notes)
    )
    return card(content, label="Evaluation")


def text(view: EvaluationView) -> str:
    """Return the same as text."""
    figures = metrics_text(dict(_figures(view)))
    lines = [f"{_heading(view)}  {one_line(view.stamp)}", figures, _size(view)]
    return "\n".join([*filter(None, lines), *(one_line(note) for note in view.notes)])


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


def _figures(view: EvaluationView) -> list[tuple[str, float]]:
    loss = [] if view.loss is None else [("loss", view.loss)]
    return [*loss, *((shortened(name, 40), value) for name, value in view.metrics.items())]


def _warning(value: float) -> str:
    return "" if math.isfinite(value) else f";color:{RED}"


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
