"""Interrupts at random moments: each stops the run, and the pieces are those of one run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from cases import PROGRAMS, draw
from stage import Stage, Trained, build, train

from fsdp_magic.errors import CellInterrupted

STEPS = 150
STOP_SECONDS = 2.0


@contextmanager
def interrupted(*after: float) -> Iterator[list[float]]:
    """Send SIGINT to this process some seconds after each other; yield when that was."""
    moments: list[float] = []
    over = threading.Event()

    def press() -> None:
        for seconds in after:
            if over.wait(seconds):
                return
            moments.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    # one that comes while nothing is asked for belongs to nobody
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        yield moments
    finally:
        over.set()
        presser.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("interrupts", [15, pytest.param(50, marks=pytest.mark.nightly)])
def test_the_pieces_of_a_run_that_was_interrupted_again_and_again_are_those_of_one_run(
    stage: Stage, interrupts: int
) -> None:
    case, chance = draw(0, "live"), random.Random(0)
    program = PROGRAMS[1]  # dropout, accumulation and clipping
    whole, pieces, ended = Trained(), Trained(), {"one": 0, "two": 0}
    build(stage.ready(2), program)
    whole.take(train(stage.session, case, STEPS, program=program))
    session = stage.ready(2)
    build(session, program)
    while sum(ended.values()) < interrupts:
        left = STEPS - len(pieces.losses)
        if left < 20:  # from the beginning again
            pieces = Trained()
            build(session, program)
            left = STEPS
        twice = chance.random() < 0.4
        presses = (chance.uniform(0.0, 0.09), *([chance.uniform(0.0, 0.06)] if twice else ()))
        runs = len(session.runs)
        with interrupted(*presses) as moments:
            try:
                train(session, case, left, program=program)
            except CellInterrupted:
                assert time.monotonic() - moments[0] < STOP_SECONDS
                ended["two" if len(moments) > 1 else "one"] += 1
        for run in session.runs[runs:]:
            pieces.take(run)
        assert pieces.losses == whole.losses[: len(pieces.losses)]
        assert pieces.grad_norms == whole.grad_norms[: len(pieces.grad_norms)]
    assert min(ended.values()) > interrupts // 10, f"the moments were badly chosen: {ended}"
    pieces.take(train(session, case, STEPS - len(pieces.losses), program=program))
    assert pieces.losses == whole.losses


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("elements", [1, 3_000_000])
def test_no_rank_stays_behind_in_a_collective(stage: Stage, elements: int) -> None:
    """A message that gloo had not written when its connection ended was waited for, for ever.

    It takes some two hundred interrupts to meet one.
    """
    session, chance = stage.ready(2), random.Random(0)
    session.run(f"import torch, torch.distributed as dist; x = torch.ones({elements})", show=False)
    for _ in range(400):
        presses = (chance.uniform(0, 0.09), chance.uniform(0, 0.06))
        with interrupted(*presses), suppress(CellInterrupted):
            session.run("while True: dist.all_reduce(x)", show=False)
    assert [o.result for o in session.run("len(x)", show=False)] == [str(elements)] * 2
