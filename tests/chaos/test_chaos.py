"""Faults at random places of random programs: nothing hangs, nothing is lost, nothing is left.

One session lives through 160 faults; 20 more end engines or what serves them. A seed draws a
case: ``python tests/chaos/run.py --seed S`` does it again. ``make nightly`` does 1,000.
"""

from __future__ import annotations

import pytest
from cases import Kind, draw
from left_over import growth
from stage import Stage
from starting import do

LIVE, IN_ONE_TEST = range(160), 10
WORLDS, WORLDS_IN_ONE_TEST = range(20), 2


def check(stage: Stage, seeds: range, kind: Kind) -> None:
    """Do the cases of seeds; a hang is that of the seed that was printed last."""
    for seed in seeds:
        case = draw(seed, kind)
        print(case, flush=True)
        outcome = do(stage, case)
        assert not outcome.problems, f"python tests/chaos/run.py --kind {kind}: {outcome}"


@pytest.mark.parametrize("first", LIVE[::IN_ONE_TEST])
def test_a_session_goes_on_after_every_fault(stage: Stage, first: int) -> None:
    check(stage, range(first, first + IN_ONE_TEST), "live")


def test_a_hundred_faults_leave_no_file_and_no_thread_open(stage: Stage) -> None:
    if len(stage.held) < 100:
        pytest.skip("the faults of this file have not been struck in this run")
    grown = growth(stage.held)
    assert len(grown) == 3, "the kernel and the same two engines all along"
    names = "[t.name for t in __import__('threading').enumerate()]"
    assert stage.session is not None
    told = (grown, stage.session.pull(names, rank="all"))
    assert all(held.descriptors <= 0 and held.threads <= 0 for held in grown.values()), told


@pytest.mark.timeout(120)  # engines that are started one by one each import torch
@pytest.mark.parametrize("first", WORLDS[::WORLDS_IN_ONE_TEST])
def test_fresh_engines_are_there_after_every_death(stage: Stage, first: int) -> None:
    check(stage, range(first, first + WORLDS_IN_ONE_TEST), "world")
