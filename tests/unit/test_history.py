"""What a session remembers for ``%fsdp_status``: the last panel of the engines that are there."""

from __future__ import annotations

import pytest

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.recovery import RestoreReport
from fsdp_magic.core.reply import EvalReport
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.notebook.evaluation import Evaluation
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
    history.leave_engines()
    assert history.last_frame is None


def ended(history: History, spec: TrainSpec, *, total: int, done: int) -> Run:
    run = history.begin(world_size=1, accumulate=1)
    run.began, run.total_steps, run.first_step, run.state = True, total, 10, "failed"
    run.ranks[0].losses = [0.0] * done
    history.end(run, spec)
    return run


def test_what_is_left_of_a_run_counts_from_the_snapshot_that_ranks_are_back_at() -> None:
    history, spec = History(), TrainSpec(steps=20, snapshot_every=5)
    ended(history, spec, total=20, done=8)
    resume = TrainSpec(resume=True)
    assert history.resumed(resume)[1] == 12
    assert history.resumed(resume, back_at=RestoreReport(step=15))[1] == 15


def test_snapshots_wait_from_the_loss_of_their_engines_to_the_next_run() -> None:
    history, spec = History(), TrainSpec(steps=20, snapshot_every=5)
    assert not history.snapshots_wait
    ended(history, TrainSpec(steps=20), total=20, done=8)
    history.leave_engines()
    assert not history.snapshots_wait
    ended(history, spec, total=20, done=8)
    history.leave_engines()
    assert history.snapshots_wait
    with pytest.raises(UsageError, match="none has begun with this model"):
        history.resumed(TrainSpec(resume=True))
    history.take_up()
    assert history.resumed(TrainSpec(resume=True), back_at=RestoreReport(step=15))[1] == 15
    ended(history, TrainSpec(resume=True), total=15, done=15)
    assert not history.snapshots_wait


def test_a_model_that_starts_anew_forgets_what_lost_engines_left() -> None:
    history = History()
    ended(history, TrainSpec(steps=20, snapshot_every=5), total=20, done=8)
    history.leave_engines()
    history.start_anew()
    history.leave_engines()
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
