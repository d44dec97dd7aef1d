"""KERNEL: whether a failed cell left the ranks at different weights, and what a person is told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.recovery import RecoverReport, RestoreReport

_TORN = (
    "The step is torn: the error came out of the optimizer step itself, or some ranks had stepped "
    "and others not, so some weights of this step may be updated and others not"
)
_ADVICE = "Build the model again in a %%fsdp_model cell before the next %%fsdp_train."
_KEPT = "On every rank the same optimizers had stepped in this step already; those updates stay."
"""Said of a manual step that failed between two of its optimizers."""


class Weights:
    """Whether the weights of all ranks belong to one step.

    Attributes:
        is_torn: whether they may differ, until a model is built again.
        torn_now: whether the cell that failed last tore a step.
        back_at: the snapshot that the ranks were put back to, until they train on; None: to none.
    """

    def __init__(self) -> None:
        self.is_torn = False
        self.torn_now = False
        self.back_at: RestoreReport | None = None

    def judge(
        self,
        reports: Sequence[RecoverReport],
        restore: Callable[[], RestoreReport],
        *,
        ran: Collection[int],
    ) -> str:
        """Find out after a failed cell, and put them back to a snapshot if a step was torn.

        Args:
            reports: of every rank.
            restore: puts every rank back to the newest snapshot.
            ran: the ranks that ran the cell; others still report the steps of an earlier one.

        Returns:
            What a person is told; nothing: all is well.
        """
        reports = [r if rank in ran else _idle(r) for rank, r in enumerate(reports)]
        self.torn_now = _is_torn(reports)
        if not self.torn_now:
            return _KEPT if any(report.some_within_step for report in reports) else ""
        restored = restore()
        self.is_torn = restored.step is None
        self.back_at = None if self.is_torn else restored
        return _line_of(restored)

    def built(self, restored: RestoreReport | None) -> None:
        """Note that a model was built, with what a snapshot held or without."""
        self.is_torn = False
        self.back_at = None if restored is None or restored.step is None else restored

    def refuse_torn(self) -> None:
        """Raise if a training cell would go on from weights that differ."""
        if self.is_torn:
            raise UsageError(
                "a step was torn, and the ranks may hold different weights; build the model again "
                "in a %%fsdp_model cell (next time %%fsdp_train --snapshot-every N keeps a "
                "snapshot to go back to)"
            )


def _idle(report: RecoverReport) -> RecoverReport:
    return replace(report, optimizer_steps=(), some_within_step=False)


def _is_torn(reports: Sequence[RecoverReport]) -> bool:
    """Return whether the ranks did not all take the same optimizer steps, each to its end."""
    first = reports[0]
    if not any(report.optimizer_steps for report in reports):
        return False
    return any(
        report.steps != first.steps
        or report.optimizer_steps != first.optimizer_steps
        or any(count.begun != count.completed for count in report.optimizer_steps)
        for report in reports
    )


def _line_of(restored: RestoreReport) -> str:
    """Return the sentence that tells of a torn step, and what became of it.

    Args:
        restored: the snapshot that every rank was put back to, or why there is none.
    """
    if restored.step is None:
        why = "".join(f" ({note})" for note in restored.notes)
        return f"{_TORN}{why}. {_ADVICE}"
    return f"{_TORN}; every rank is back at the snapshot of step {restored.step:,}."


def restored_notes(restored: RestoreReport | None, *, steps_left: int | None) -> tuple[str, ...]:
    """Return what is said of a snapshot that was put into models that were built anew.

    Args:
        restored: the snapshot; None: there was none.
        steps_left: of the run that was under way; None: nobody knows.
    """
    if restored is None or restored.step is None:
        return () if restored is None else restored.notes
    step = f"{restored.step:,}"
    resume = ""
    if steps_left is not None and steps_left > 0:
        resume = f", and %%fsdp_train --resume takes the other {steps_left:,}"
    return (
        f"the snapshot of step {step} was loaded: the next step is {step}{resume}; run the cell "
        "again to start at 0 instead",
        *restored.notes,
    )
