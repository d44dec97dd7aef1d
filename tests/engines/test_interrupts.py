"""Interrupts: every rank stops, no reply is lost, and the session goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
from interrupting import interrupted_after, stop_pressed

from fsdp_magic.errors import CellFailedError, CellInterrupted
from fsdp_magic.notebook.ranks import Ranks
from fsdp_magic.notebook.session import Session


def check_usable(session: Session) -> None:
    code = (
        "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); x.item()"
    )
    outputs = session.run(code, show=False)
    assert [output.result for output in outputs] == [f"{session.world_size}.0"] * 2


STOPPED = {
    "sleeping": "import time; time.sleep(60)",
    "computing": "while True: pass",
    "computing with torch": "import torch\nx = torch.ones(200, 200)\nwhile True: x = x @ x",
    "waiting for a peer that never comes": (
        "import torch.distributed as dist\nif rank == 0: dist.barrier()"
    ),
    "all waiting": ("import torch, torch.distributed as dist\ndist.recv(torch.ones(1), 1 - rank)"),
    "one sleeping, one waiting": (
        "import time, torch.distributed as dist\nif rank: time.sleep(60)\ndist.barrier()"
    ),
}


@pytest.mark.parametrize("doing", STOPPED)
def test_an_interrupt_stops_every_rank_and_the_session_goes_on(
    session: Session, doing: str
) -> None:
    session.run("import torch.distributed", show=False)
    started = time.monotonic()
    with interrupted_after(0.3), pytest.raises(CellInterrupted) as caught:
        session.run(f"reached = 1\n{STOPPED[doing]}\nreached = 2", show=False)
    assert time.monotonic() - started < 10.0
    assert isinstance(caught.value, KeyboardInterrupt)
    assert session.run("reached", show=False)[0].result == "1"
    check_usable(session)


def test_the_handler_of_the_notebook_is_back_afterwards(session: Session) -> None:
    before = signal.getsignal(signal.SIGINT)
    session.run("1", show=False)
    assert signal.getsignal(signal.SIGINT) is before
    with interrupted_after(0.1):
        mine = signal.getsignal(signal.SIGINT)
        with pytest.raises(CellInterrupted):
            session.run("import time; time.sleep(60)", show=False)
        assert signal.getsignal(signal.SIGINT) is mine


def test_a_cell_that_catches_the_interrupt_is_interrupted_all_the_same(session: Session) -> None:
    code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: caught = True"
    with interrupted_after(0.2), pytest.raises(CellInterrupted):
        session.run(code, show=False)
    assert session.run("caught", show=False)[0].result == "True"


def test_what_was_printed_before_an_interrupt_is_shown(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupted_after(0.5), pytest.raises(CellInterrupted):
        session.run("import time; print('before'); time.sleep(60)")
    assert "[ranks 0-1] before" in capsys.readouterr().out


def test_interrupts_at_random_moments_around_a_cells_end_lose_no_reply(session: Session) -> None:
    pids = [status.pid for status in session.status(show=False)]
    chance, middle = random.Random(0), 0.025
    session.run("import time", show=False)
    ended, kinds = {"in order": 0, "interrupted": 0}, {"interrupted"}

    def interrupt(after: float) -> None:
        time.sleep(after)
        for pid in pids:
            os.kill(pid, signal.SIGINT)

    for _ in range(100):
        after = chance.uniform(middle - 0.01, middle + 0.01)
        interrupter = threading.Thread(target=interrupt, args=(after,))
        interrupter.start()
        started = time.monotonic()
        try:
            session.run("import time; time.sleep(0.02)", show=False)
            ended["in order"] += 1
            middle = max(0.011, middle - 0.001)  # what a cell takes depends on the machine
        except CellFailedError as error:
            kinds |= {failure.kind for failure in error.exceptions.values()}
            ended["interrupted"] += 1
            middle += 0.001
        assert time.monotonic() - started < 10.0, "a reply was late"
        interrupter.join()
    assert kinds == {"interrupted"}
    assert min(ended.values()) > 10, f"the moments were badly chosen: {ended}"
    check_usable(session)


def test_an_interrupt_while_a_cell_is_being_sent_reaches_all_ranks_or_none(
    session: Session,
) -> None:
    for step in range(40):
        timer = threading.Timer(step * 1e-4, os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        try:
            timer.start()
            session.run("import time; time.sleep(60)", show=False)
        except KeyboardInterrupt:  # either ours, or Python's own before anything was sent
            pass
        timer.join()
        assert time.monotonic() - started < 10.0
        assert len(session.status(show=False)) == 2
    check_usable(session)


def test_an_engine_ignores_interrupts_between_cells(session: Session) -> None:
    for status in session.status(show=False):
        os.kill(status.pid, signal.SIGINT)
    time.sleep(0.1)
    check_usable(session)


MODEL = """
import time, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = list(torch.randn(64, 3))
stuck = True
"""
STEP = "loss = model(batch).square().mean()"
OPTIONS = {"data": "data", "micro_batch_size": 2, "show": False}
AT_STEP_2 = "stuck and step == 2"
ALL_LATE = f"{stop_pressed(AT_STEP_2)}if {AT_STEP_2}: time.sleep(2)\n{STEP}"


@pytest.mark.parametrize("gaps", [(), (0.01,), (0.6,)])
def test_a_step_that_a_rank_never_ends_is_taken_back_and_nothing_is_lost(
    session: Session, monkeypatch: pytest.MonkeyPatch, gaps: tuple[float, ...]
) -> None:
    """One press is enough, however many come, also while the ranks are brought back into order."""
    session.model(MODEL, show=False)
    expected = session.train(STEP, steps=6, **OPTIONS).losses
    whole = session.eval(STEP, **OPTIONS)
    session.model(MODEL, show=False)
    recover = Ranks._recover

    def pressed(ranks: Ranks) -> object:
        for _ in gaps:
            os.kill(os.getpid(), signal.SIGINT)
        with interrupted_after(*(0.002 for _ in gaps)):
            return recover(ranks)

    monkeypatch.setattr(Ranks, "_recover", pressed)
    started = time.monotonic()
    late = stop_pressed(AT_STEP_2, *gaps, then="time.sleep(60)") + STEP
    with interrupted_after(), pytest.raises(CellInterrupted) as caught:
        session.train(late, steps=6, **OPTIONS)
    assert time.monotonic() - started < 10.0
    run = caught.value.run
    assert run is session.runs[-1]
    assert (run.state, run.steps) == ("stopped", 2)

    session.run("stuck = False", show=False)
    again = session.train(late, steps=4, **OPTIONS)
    assert run.losses + again.losses == expected
    assert session.eval(STEP, **OPTIONS).loss == whole.loss


def test_one_press_lets_a_long_step_of_all_ranks_end(session: Session) -> None:
    session.model(MODEL, show=False)
    with interrupted_after(), pytest.raises(CellInterrupted) as caught:
        session.train(ALL_LATE, steps=6, **OPTIONS)
    assert (caught.value.run.state, caught.value.run.steps) == ("stopped", 3)


def test_a_handler_that_a_cell_installs_ends_with_it(session: Session) -> None:
    session.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", show=False)
    with interrupted_after(0.5), pytest.raises(CellInterrupted):
        session.run("import time; time.sleep(8)", show=False)
    check_usable(session)
