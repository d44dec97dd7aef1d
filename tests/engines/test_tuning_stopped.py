"""A search that is interrupted, that waits, or that loses an engine leaves everything as before."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from as_before import BUILT, CELL, assert_as_before, note

from fsdp_magic.errors import CellFailedError, EngineDiedError, FsdpError
from fsdp_magic.notebook.session import Session

OPTIONS = {"data": "data", "scheduler_every": "step", "micro_batch_size": 5, "show": False}
SLOW = f"if slow: time.sleep(0.02)\n{CELL}"


def trained(session: Session, cell: str, *, seed: str = "zero1") -> list[float]:
    session.run("import time, os\nslow = bad = False", show=False)
    session.model(BUILT, names=["model", "teacher"], strategy=seed, show=False)
    session.train(cell, steps=3, **OPTIONS)
    comes = session.train(cell, steps=6, trial=True, **OPTIONS).losses
    note(session)
    return comes


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Interrupt as the notebook's ■ does, after some time; the inside is left afterwards."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
        timer.join()
        time.sleep(0.01)  # let it be heard
    finally:
        timer.join()


@pytest.mark.parametrize(
    "times", [3, pytest.param(20, marks=(pytest.mark.nightly, pytest.mark.timeout(300)))]
)
def test_interrupts_at_random_moments_leave_no_trace(session, times) -> None:
    comes = trained(session, SLOW)
    session.run("slow = True", show=False)
    options = {"objective": "throughput", "max": 16, "show": False}
    began = time.monotonic()
    session.tune(**options)
    whole = time.monotonic() - began
    chance, stopped = random.Random(8), 0
    moments = [0.02, *(chance.uniform(0.0, whole) for _ in range(times - 1))]
    for moment in moments:
        pressed = time.monotonic() + moment
        try:
            with interrupt_after(moment):
                session.tune(**options)
        except KeyboardInterrupt:
            stopped += 1
        assert time.monotonic() - pressed < 3.0 + max(0.0, whole - moment)
        assert_as_before(session)
    assert stopped == times, "whoever presses ■ is heard"
    session.run("slow = False", show=False)
    assert session.train(SLOW, steps=6, **OPTIONS).losses == comes


def test_an_interrupt_stops_a_plan_in_the_making(session, monkeypatch) -> None:
    from fsdp_magic.notebook import session_tuning

    comes = trained(session, SLOW)

    def pressed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(session_tuning.Tuning, "_predictions", pressed)
    with pytest.raises(KeyboardInterrupt):
        session.tune(max=4, show=False)
    assert_as_before(session)
    monkeypatch.undo()
    assert session.tune(max=4, show=False).micro_batch_size == 4
    assert session.train(SLOW, steps=6, **OPTIONS).losses == comes


STUCK = f"if bad and rank == 0 and micro_batch_size > 2: time.sleep(60)\n{CELL}"


def test_a_size_that_takes_too_long_is_an_error(session) -> None:
    comes = trained(session, STUCK)
    session.run("bad = True", show=False)
    began = time.monotonic()
    with pytest.raises(FsdpError, match=r"after 1 s \(--timeout\)"):
        session.tune(max=4, timeout=1, show=False)
    assert time.monotonic() - began < 6.0
    assert_as_before(session)
    session.run("bad = False", show=False)
    assert session.train(STUCK, steps=6, **OPTIONS).losses == comes


def test_an_interrupt_frees_a_rank_that_never_comes(session) -> None:
    comes = trained(session, STUCK)
    session.run("bad = True", show=False)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupt_after(1.0):
        session.tune(max=4, show=False)
    assert time.monotonic() - began < 4.0
    assert_as_before(session)
    session.run("bad = False", show=False)
    assert session.train(STUCK, steps=6, **OPTIONS).losses == comes


def test_a_cell_that_stops_itself_is_tried_as_far_as_it_goes(session) -> None:
    cell = f"if bad and step > 3: fsdp.stop()\n{CELL}"
    comes = trained(session, cell)
    session.run("bad = True", show=False)
    tuned = session.tune(max=4, show=False)
    assert tuned.micro_batch_size == 4
    assert_as_before(session)
    session.run("bad = False", show=False)
    assert session.train(cell, steps=6, **OPTIONS).losses == comes


def test_f6_an_engine_that_dies_in_a_probe_is_named_and_the_world_comes_back(session) -> None:
    cell = f"if bad and rank == 1 and step == 4: os.kill(os.getpid(), 9)\n{CELL}"
    trained(session, cell)
    session.run("bad = True", show=False)
    began = time.monotonic()
    with pytest.raises(EngineDiedError, match="rank 1") as caught:
        session.tune(max=4, show=False)
    assert time.monotonic() - began < 4.0
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)
    with pytest.raises(FsdpError, match="restart"):
        session.tune(max=4, show=False)
    session.restart()
    comes = trained(session, cell)
    assert session.tune(max=4, show=False).micro_batch_size == 4
    assert_as_before(session)
    assert session.train(cell, steps=6, **OPTIONS).losses == comes


def test_a_search_that_nobody_ends_is_ended_by_the_next_cell(session) -> None:
    from fsdp_magic.core.tuning import HoldRequest
    from fsdp_magic.notebook.screen import Nowhere

    comes = trained(session, CELL)
    session.engines.ask("hold", dict.fromkeys(range(2), HoldRequest()), screen=Nowhere())
    assert_as_before(session)
    assert session.train(CELL, steps=6, **OPTIONS).losses == comes


@pytest.mark.nightly
def test_what_breaks_in_the_optimizers_step_of_a_probe_is_put_back(session) -> None:
    comes = trained(session, CELL)
    session.run(
        """
whole = optimizer.step
def broken(*args, **kwargs):
    if rank == 1:
        raise RuntimeError("broken")
    return whole(*args, **kwargs)
optimizer.step = broken
""",
        show=False,
    )
    with pytest.raises(CellFailedError, match="broken"):
        session.tune(max=4, show=False)
    session.run("del optimizer.step", show=False)
    assert_as_before(session)
    assert session.train(CELL, steps=6, **OPTIONS).losses == comes
