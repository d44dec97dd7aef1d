"""What chaos has found, each as a case by hand."""

from __future__ import annotations

from dataclasses import replace

from cases import PROGRAMS, draw
from stage import Stage
from strike import strike


def test_a_peer_that_has_begun_the_next_epoch_takes_that_back(stage: Stage) -> None:
    """One rank was stuck after the last step of an epoch; its peer had turned to the next."""
    case = replace(
        draw(0, "live"),
        fault="stuck, timed out",
        how="sleep",
        place="after step",
        rank=0,
        step=3,
        program=PROGRAMS[1],
    )
    outcome = strike(stage, case)
    assert not outcome.problems, outcome
