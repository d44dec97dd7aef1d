"""KERNEL: whether a failed cell left the ranks at different weights, and what a person is told."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.protocol import RecoverReport, RestoreReport

_TORN = (
    "The step is torn: the error came out of the optimizer step itself, or some ranks had stepped "
    "and others not, so some weights of this step may be updated and others not"
)
_ADVICE = "Build the model again in a %%fsdp_model cell before the next %%fsdp_train."
KEPT = "On every rank the same optimizers had stepped in this step already; those updates stay."
"""Said of a manual step that failed between two of its optimizers."""


def is_torn(reports: Sequence[RecoverReport]) -> bool:
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


def torn_line(restored: RestoreReport | None) -> str:
    """Return the sentence that tells of a torn step, and what became of it.

    Args:
        restored: the snapshot that every rank was put back to; None: there was none.
    """
    if restored is None or restored.step is None:
        why = "".join(f" ({note})" for note in restored.notes) if restored is not None else ""
        return f"{_TORN}{why}. {_ADVICE}"
    return f"{_TORN}; every rank is back at the snapshot of step {restored.step:,}."


def refusal_of_torn() -> UsageError:
    """Return the error of a training cell on weights that a torn step left."""
    return UsageError(
        "a step was torn, and the ranks may hold different weights; build the model again in a "
        "%%fsdp_model cell (next time %%fsdp_train --snapshot-every N keeps a snapshot to go back "
        "to)"
    )


def restored_notes(restored: RestoreReport | None) -> tuple[str, ...]:
    """Return what is said of a snapshot that was put into models that were built anew."""
    if restored is None or restored.step is None:
        return () if restored is None else restored.notes
    step = f"{restored.step:,}"
    return (f"the snapshot of step {step} was loaded: the next step is {step}", *restored.notes)
