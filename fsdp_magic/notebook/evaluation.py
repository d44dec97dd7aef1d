"""KERNEL: an evaluation as a person holds it: loss, metrics, and the rows that were collected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fsdp_magic.core.reply import EvalReport
from fsdp_magic.notebook import display
from fsdp_magic.panels import evaluation as panel


class Evaluation:
    """What ``%%fsdp_eval`` found.

    Attributes:
        loss: over all samples; None if the cell bound none.
        metrics: over all samples, by name.
        collected: by name, one row per sample in the order of the data: an array where the cell
            bound tensors, else a list.
        samples: how many there were; 0 where batches have no number of samples.
        seconds: it took, on the slowest rank.
        notes: sentences a person should read.
        last_frame: its card, as HTML and as text.
    """

    def __init__(self, reports: Sequence[EvalReport]) -> None:
        record = reports[0].record
        self.step = record.step
        self.loss = record.loss
        self.metrics = dict(record.metrics)
        self.samples = record.samples
        self.seconds = max(report.seconds for report in reports)
        self.notes = list(dict.fromkeys(note for report in reports for note in report.notes))
        self.collected = _collected([piece for report in reports for piece in report.rows])

        self.last_frame = self._frame()

    def show(self) -> None:
        """Show it as a card."""
        display.show(*self.last_frame)
        display.mark_shown(self)

    def _frame(self) -> tuple[str, str]:
        view = panel.EvaluationView(
            step=self.step,
            loss=self.loss,
            metrics=self.metrics,
            samples=self.samples,
            seconds=self.seconds,
            rows={name: len(rows) for name, rows in self.collected.items()},
            notes=tuple(self.notes),
            stamp=display.stamp(),
        )
        return panel.html(view), panel.text(view)

    def _ipython_display_(self) -> None:
        """Show it where a cell ends in it, unless the cell has just shown it."""
        if not display.is_shown(self):
            self.show()

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.4g}, "
        metrics = "".join(f"{name} {value:.4g}, " for name, value in self.metrics.items())
        samples = f"{self.samples} samples, " if self.samples else ""
        return f"<Evaluation: {loss}{metrics}{samples}{self.seconds:.1f} s>"


def _collected(pieces: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Put the ranks' pieces together in the order of the data."""
    ordered = sorted(pieces, key=lambda piece: piece[0])
    names = dict.fromkeys(name for _, rows in ordered for name in rows)
    return {name: _joined([rows[name] for _, rows in ordered if name in rows]) for name in names}


def _joined(parts: list[Any]) -> Any:
    """Return arrays of like rows as one array, anything else as one list of rows."""
    numpy: Any = sys.modules.get("numpy")  # arrays that came have brought it; nothing else does
    arrays = numpy is not None and all(isinstance(part, numpy.ndarray) for part in parts)
    if arrays and len({part.shape[1:] for part in parts}) == 1:
        return numpy.concatenate(parts)
    return [row for part in parts for row in part]
