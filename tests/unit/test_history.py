"""What a session remembers for ``%fsdp_status``: the last panel of the engines that are there."""

from __future__ import annotations

from fsdp_magic.core.protocol import EvalReport
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.notebook.evaluation import Evaluation
from fsdp_magic.notebook.history import History


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
