"""What ranks are asked and report after a failed cell: steps taken, snapshots; data only, pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Put everything back to the newest snapshot that all ranks have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCount:
    """Steps of one optimizer in a cell: how many began, and how many came to their end."""

    begun: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverReport:
    """What a rank has done to the weights by the time a cell failed.

    Attributes:
        steps: of training, since the model was built.
        optimizer_steps: of the cell, by optimizer, in the order in which they first stepped.
        some_within_step: whether a manual step failed after some optimizer of it had stepped.
    """

    steps: int
    optimizer_steps: tuple[StepCount, ...] = ()
    some_within_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """Which snapshot a rank is back at.

    Attributes:
        step: steps of training that it holds; None: there is none that fits.
        waits: whether it is still there, for a model that fits.
        run_id: of the run that made it.
        epochs_ended: of that run by then.
        notes: sentences a person should read.
    """

    step: int | None
    waits: bool = False
    run_id: int = 0
    epochs_ended: int = 0
    notes: tuple[str, ...] = ()


def gone(names: Iterable[str], *, has_snapshot: bool) -> str:
    """Return what is said where models are used that went with their engines.

    Args:
        names: of the models; none: nobody knows them.
        has_snapshot: whether building them again loads a snapshot.
    """
    which = ", ".join(f"`{name}`" for name in names)
    they = f"{which} is" if which.count("`") == 2 else f"{which or 'the models'} are"
    then = ", which loads the snapshot, then %%fsdp_train --resume" if has_snapshot else ""
    build = "it" if they.endswith(" is") else "them"
    return f"{they} gone since %fsdp_restart; build {build} again in %%fsdp_model{then}"
