"""What a session remembers for ``%fsdp_status``: the last panel of the engines that are there."""

from __future__ import annotations

import copy

import pytest

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.recovery import RestoreReport
from fsdp_magic.core.reply import EvalReport
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import EvaluationRecord, RunState
from fsdp_magic.notebook.evaluation import Evaluation
from fsdp_magic.notebook.found_size import FoundSize
from fsdp_magic.notebook.history import History
from fsdp_magic.notebook.run import Run


def test_the_last_panel_is_that_of_the_newest_run_or_evaluation() -> None:
    history = History()
    run = history.begin(world_size=1, accumulate=1)
    run.last_frame = ("<b>run</b>", "run")
    history.end(run, TrainSpec())
    assert history.last_frame == ("<b>run</b>", "run")
    record = EvaluationRecord(step=3, loss=1.25, metrics={}, samples=9)
    history.last_frame = Evaluation([EvalReport(record=record, rows=(), seconds=1.0)]).last_frame
    assert history.last_frame[1].startswith("Evaluation after step 3")
    refused = history.begin(world_size=1, accumulate=1)
    history.end(refused, TrainSpec())
    assert history.last_frame[1].startswith("Evaluation after step 3")
    history.leave_engines(lost=False)
    assert history.last_frame is None


def ended(
    history: History, spec: TrainSpec, *, total: int, done: int, state: RunState = "failed"
) -> Run:
    run = history.begin(world_size=1, accumulate=1)
    if spec.snapshot_every is not None:
        history.begin_snapshots(run)
    run.began, run.total_steps, run.first_step, run.state = True, total, 10, state
    run.ranks[0].losses = [0.0] * done
    history.end(run, spec)
    return run


def test_what_is_left_of_a_run_counts_from_the_snapshot_that_ranks_are_back_at() -> None:
    history, spec = History(), TrainSpec(steps=20, snapshot_every=5)
    ended(history, spec, total=20, done=8)
    resume = TrainSpec(resume=True)
    assert history.resumed(resume)[1] == 12
    assert history.resumed(resume, back_at=RestoreReport(step=15))[1] == 15


def test_what_finishes_a_run_keeps_its_size_whatever_was_found_since() -> None:
    history, spec = History(), TrainSpec(data="d", steps=20)
    ended(history, spec, total=20, done=8).micro_batch_size = 8
    history.use(FoundSize(data="d", micro_batch_size=12, fits=12))
    resumed, note = history.sized(TrainSpec(data="d", resume=True), ranks=1)
    assert (resumed.micro_batch_size, "as in the run" in note) == (8, True)
    assert history.sized(TrainSpec(data="d"), ranks=1)[0].micro_batch_size == 12


SNAPSHOTS = TrainSpec(steps=20, snapshot_every=5)
RESUME = TrainSpec(resume=True)


def test_snapshots_wait_from_the_loss_of_their_engines_to_the_next_run() -> None:
    history = History()
    ended(history, TrainSpec(steps=20), total=20, done=8)
    history.leave_engines(lost=True)
    assert not history.snapshots_wait
    history.built(["model"], None)
    ended(history, SNAPSHOTS, total=20, done=8)
    history.leave_engines(lost=True)
    assert history.snapshots_wait
    with pytest.raises(UsageError) as caught:
        history.resumed(RESUME)
    assert str(caught.value) == (
        "`model` is gone since %fsdp_restart; build it again in %%fsdp_model, which loads the "
        "snapshot, then %%fsdp_train --resume"
    )
    back = RestoreReport(step=15)
    history.built(["model"], back)
    assert history.steps_left(back) == 15
    spec, left = history.resumed(RESUME, back_at=back)
    assert (left, spec.snapshot_every) == (15, 5), "a run that is finished is kept as safe"
    assert history.resumed(TrainSpec(resume=True, snapshot_every=2))[0].snapshot_every == 2
    ended(history, spec, total=15, done=15)
    assert not history.snapshots_wait


def test_a_second_restart_before_a_run_loses_no_snapshot() -> None:
    history = History()
    ended(history, SNAPSHOTS, total=20, done=8)
    for lost in (True, False):
        history.leave_engines(lost=lost)
        assert history.snapshots_wait
    history.built(["model"], RestoreReport(step=15))
    history.leave_engines(lost=False)
    assert history.snapshots_wait
    history.built(["model"], RestoreReport(step=15))
    ended(history, TrainSpec(steps=2), total=2, done=2, state="stopped")
    history.leave_engines(lost=False)
    assert not history.snapshots_wait


def test_only_what_a_run_lost_waits_for_its_model() -> None:
    for lost, state in ((False, "failed"), (True, "done")):
        history = History()
        history.built(["model"], None)
        ended(history, SNAPSHOTS, total=20, done=8, state=state)
        history.leave_engines(lost=lost)
        assert not history.snapshots_wait
        with pytest.raises(UsageError, match=r"again in %%fsdp_model, and leave --resume out: the"):
            history.resumed(RESUME)


def test_a_snapshot_that_was_not_loaded_waits_for_the_model_that_fits() -> None:
    history = History()
    ended(history, SNAPSHOTS, total=20, done=8)
    history.leave_engines(lost=True)
    back = RestoreReport(step=15)
    for restored in (back, RestoreReport(step=None, waits=True)):
        history.built(["model"], restored)
    ended(history, TrainSpec(steps=2), total=2, done=2, state="done")
    assert history.snapshots_wait
    other = copy.copy(history)
    other.leave_engines(lost=False)
    assert not other.snapshots_wait, "another model was trained, and nothing was lost since"
    history.built(["model"], back)
    ended(history, TrainSpec(steps=2), total=2, done=2, state="done")
    assert not history.snapshots_wait


def test_a_run_that_never_began_leaves_the_word_to_the_snapshots_that_are_there() -> None:
    history = History()
    ended(history, SNAPSHOTS, total=20, done=20, state="done")
    refused = history.begin(world_size=1, accumulate=1)
    history.begin_snapshots(refused)
    refused.state = "failed"
    history.end(refused, SNAPSHOTS)
    history.leave_engines(lost=True)
    assert not history.snapshots_wait


def test_a_model_that_starts_anew_forgets_what_lost_engines_left() -> None:
    for restored in (None, RestoreReport(step=None)):
        history = History()
        ended(history, SNAPSHOTS, total=20, done=8)
        history.leave_engines(lost=True)
        history.built(["model"], restored)
        history.leave_engines(lost=True)
        assert not history.snapshots_wait


def test_a_run_of_unknown_length_counts_the_epochs_of_its_snapshot() -> None:
    history = History()
    spec = TrainSpec(data="stream", epochs=5, snapshot_every=5)
    run = ended(history, spec, total=1, done=8)
    run.total_steps, run.epochs_ended = None, 3
    resume = TrainSpec(data="stream", resume=True)
    assert history.resumed(resume)[0].epochs == 2
    back = RestoreReport(step=15, run_id=run.run_id, epochs_ended=1)
    assert history.resumed(resume, back_at=back)[0].epochs == 4
