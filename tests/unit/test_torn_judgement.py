"""Whether ranks that failed are at one state, told from what each of them counted."""

from __future__ import annotations

import pytest

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.recovery import RecoverReport, RestoreReport, StepCount
from fsdp_magic.notebook.torn_steps import Weights, restored_notes


def report(*counts: tuple[int, int], steps: int = 3, within: bool = False) -> RecoverReport:
    return RecoverReport(
        steps=steps,
        optimizer_steps=tuple(StepCount(begun=b, completed=c) for b, c in counts),
        some_within_step=within,
    )


def none() -> RestoreReport:
    return RestoreReport(step=None)


@pytest.mark.parametrize(
    "reports",
    [
        (report(), report()),
        (report((3, 3)), report((3, 3))),
        (report((3, 3), (1, 1)), report((3, 3), (1, 1))),
        (report(steps=0), report(steps=3)),  # a model cell that failed on one rank
    ],
)
def test_ranks_that_took_the_same_whole_steps_are_together(reports):
    weights = Weights()
    assert weights.judge(reports, none, ran=(0, 1)) == ""
    weights.refuse_torn()


@pytest.mark.parametrize(
    "reports",
    [
        (report((3, 3)), report((3, 2))),
        (report((3, 2)), report((3, 2))),
        (report((4, 4)), report((3, 3))),
        (report((3, 3), (1, 1)), report((3, 3))),
        (report((3, 3)), report()),
        (report((3, 3)), report((3, 3), steps=2)),
    ],
)
def test_anything_else_is_torn_until_a_model_is_built(reports):
    weights = Weights()
    assert "Build the model again" in weights.judge(reports, none, ran=(0, 1))
    with pytest.raises(UsageError, match=r"--snapshot-every N") as caught:
        weights.refuse_torn()
    assert len(str(caught.value).splitlines()) == 1
    weights.built(None)
    weights.refuse_torn()


def test_a_snapshot_puts_torn_ranks_back_together():
    weights = Weights()
    back = RestoreReport(step=1_040)
    said = weights.judge((report((3, 3)), report((3, 2))), lambda: back, ran=(0, 1))
    assert said.endswith("every rank is back at the snapshot of step 1,040.")
    assert weights.back_at is back
    weights.refuse_torn()


def test_why_a_snapshot_does_not_fit_is_said():
    other = RestoreReport(step=None, notes=("the snapshot of step 4 does not fit: x is gone",))
    said = Weights().judge((report((1, 1)), report()), lambda: other, ran=(0, 1))
    assert "(the snapshot of step 4 does not fit: x is gone)" in said


def test_updates_that_all_ranks_made_are_said_to_stay():
    weights = Weights()
    said = weights.judge(
        (report((3, 3), within=True), report((3, 3), within=True)), none, ran=(0, 1)
    )
    assert "those updates stay" in said
    assert not weights.torn_now


def test_the_next_step_after_a_snapshot_is_named():
    assert restored_notes(RestoreReport(step=40, notes=("more",)), steps_left=None) == (
        "the snapshot of step 40 was loaded: the next step is 40; run the cell again to start at "
        "0 instead",
        "more",
    )
    assert restored_notes(None, steps_left=None) == ()


def test_ranks_that_did_not_run_the_cell_report_an_earlier_one() -> None:
    reports = (report(), report((3, 3)))
    assert Weights().judge(reports, none, ran=(0,)) == ""
    assert "torn" in Weights().judge(reports, none, ran=(0, 1))
