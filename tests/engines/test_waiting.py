"""A rank waits and another never comes: where each is, live, at a timeout, at an interrupt."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from interrupting import interrupted_after
from test_interrupts import check_usable

from fsdp_magic.errors import CellFailedError, CellInterrupted
from fsdp_magic.notebook import training as training_of
from fsdp_magic.notebook import waiting
from fsdp_magic.notebook.session import Session

SETUP = "import re, time, torch, torch.distributed as dist"
MODEL = """
import time, torch, torch.distributed as dist
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TIMED_OUT = "the cell was stopped after {} s (--timeout)"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(waiting, "_SILENT_SECONDS", 0.6)


def rows(text: str) -> list[str]:
    """Return lines with single spaces, and without the times."""
    return [re.sub(r" \d\d:\d\d$", "", " ".join(line.split())) for line in text.splitlines()]


def test_an_endless_loop_is_told_live_and_at_the_timeout(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a rank that never lets go of the interpreter answers late, and must answer the same question
    monkeypatch.setattr(waiting, "WAIT_SECONDS", 0.8)
    monkeypatch.setattr(waiting, "_SILENT_SECONDS", 10.0)
    session.run(SETUP, show=False)
    capsys.readouterr()
    with pytest.raises(CellFailedError) as caught:
        session.run("if rank == 0:\n    while True: pass\ndist.barrier()", timeout=5)
    table = [
        "0 computes 2: while True: pass",
        "1 calls barrier, waits for rank 0 3: dist.barrier()",
    ]
    assert rows(str(caught.value)) == [TIMED_OUT.format(5), rows(str(caught.value))[1], *table]
    head, *told, hint = rows(capsys.readouterr().err)
    assert (head, told) == ("rank what it does line of the cell since", table)
    assert hint == "it goes on when the others come; press stop to end it"
    check_usable(session)


def test_a_rank_that_waits_for_one_that_has_left_is_ended(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forward of a sharded model under ``if rank == 0:``, which would wait for ever."""
    session.model(MODEL, show=False)
    capsys.readouterr()
    with pytest.raises(CellFailedError) as caught:
        session.run("if rank == 0:\n    model(torch.ones(1, 4))")
    assert str(caught.value).startswith(
        "rank 0 gathers `model` (line 2 of the cell: model(torch.ones(1, 4))), and rank 1 has "
        "left the cell and will never come;\nwhat needs every rank"
    )
    assert capsys.readouterr().err == ""
    assert session.pull("model.weight").shape == (4, 4)


def test_ranks_that_wait_for_each_other_are_ended(session: Session) -> None:
    session.model(MODEL, show=False)
    with pytest.raises(CellFailedError) as caught:
        session.eval(
            "if rank == 1: dist.barrier()\nloss = (batch * 2).sum()",
            data="[torch.ones(4)] * 8",
            show=False,
        )
    told = str(caught.value)
    assert told.startswith("rank 0 is at a batch of the evaluation, rank 1 calls barrier (line 1")
    assert "they wait for each other, and none can go on" in told
    check_usable(session)


def test_a_message_may_still_come_from_a_rank_that_has_left(session: Session) -> None:
    session.run(SETUP, show=False)
    with pytest.raises(CellFailedError, match=r"--timeout(.|\n)*calls recv, waits for rank 1"):
        session.run("if rank == 0: dist.recv(torch.ones(1), 1)", timeout=1.5, show=False)


def test_a_rank_that_works_while_others_have_left_or_all_work_is_left_alone(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(SETUP, show=False)
    session.run("if rank == 0: time.sleep(0.6)")
    session.run("time.sleep(0.6)")
    assert capsys.readouterr().err == ""


def test_a_rank_in_a_training_step_is_shown_in_the_panel_and_the_run_goes_on(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[list[str]] = []
    frame = training_of.TrainingPanel._frame

    def drawn(panel: training_of.TrainingPanel) -> tuple[str, str]:
        html, text = frame(panel)
        shown.append(rows(text))
        return html, text

    monkeypatch.setattr(training_of.TrainingPanel, "_frame", drawn)
    monkeypatch.setattr(training_of, "_FRAME_SECONDS", 0.1)
    session.model(MODEL, show=False)
    cell = """if rank == 0 and step == 1:
    time.sleep(2)
loss = model(torch.ones(2, 4)).sum()
if rank == 1 and step == 2:
    time.sleep(2)
"""
    run = session.train(cell, steps=4)
    assert (run.state, run.steps) == ("done", 4)
    told = [line for lines in shown for line in lines]
    assert "0 computes 2: time.sleep(2)" in told
    assert "1 gathers `model`, waits for rank 0 3: loss = model(torch.ones(2, 4)).sum()" in told
    assert "0 reduces the gradients of `model`, waits for rank 1 backward" in told
    assert not any("waits for rank" in line for line in shown[-1])


def test_one_press_ends_a_run_whose_table_is_up_at_once(session: Session) -> None:
    session.model(MODEL, show=False)
    cell = "if rank == 0 and step == 1: time.sleep(60)\nloss = model(torch.ones(2, 4)).sum()"
    pressed: list[float] = []

    def press() -> None:
        deadline = time.monotonic() + 30
        while not session.runs or session.runs[-1].waiting is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with interrupted_after(), pytest.raises(CellInterrupted) as caught:
        session.train(cell, steps=4, show=False)
    presser.join()
    assert time.monotonic() - pressed[0] < 3.0
    run = caught.value.run
    assert (run.state, run.steps, run.is_stopping) == ("stopped", 1, True)
    assert run.waited is not None


def test_votes_and_the_data_are_named(session: Session) -> None:
    session.model(MODEL, show=False)
    slow = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        if rank == 0 and index > 8: time.sleep(30)
        return torch.ones(4)
data = torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=0)
frozen = torch.nn.Linear(4, 1).requires_grad_(False)
"""
    session.run(slow, show=False)
    with pytest.raises(CellFailedError) as caught:
        session.train("loss = model(batch).sum()", data="data", steps=8, timeout=3, show=False)
    reads = "0 computes 4: if rank == 0 and index > 8: time.sleep(30)"
    assert rows(str(caught.value))[2] == reads, "the person's own code, which the library calls"
    assert "waits for rank 0" in rows(str(caught.value))[3]
    assert "is at the start of a step" in rows(str(caught.value))[3]
    with pytest.raises(CellFailedError) as caught:
        session.eval(
            "if rank == 1: time.sleep(30)\nloss = model(batch).sum()",
            data="[torch.ones(4)] * 8",
            timeout=3,
            show=False,
        )
    assert rows(str(caught.value))[0] == TIMED_OUT.format(3)
    assert "1 computes 1: if rank == 1: time.sleep(30)" in rows(str(caught.value))


def test_an_interrupted_cell_says_where_its_ranks_waited(session: Session) -> None:
    session.run(SETUP, show=False)
    with interrupted_after(0.3), pytest.raises(CellInterrupted) as caught:
        session.run("if rank == 0:\n    dist.recv(torch.ones(1), 1)\ndist.barrier()", show=False)
    told = rows(str(caught.value))
    assert told[0] == "interrupted"
    assert told[2:] == [
        "0 calls recv, waits for rank 1 2: dist.recv(torch.ones(1), 1)",
        "1 calls barrier, waits for rank 0 3: dist.barrier()",
    ]
    with interrupted_after(0.2), pytest.raises(CellInterrupted) as caught:
        session.run("time.sleep(10)", show=False)
    assert str(caught.value) == "interrupted"
    check_usable(session)


@contextmanager
def standing_still(pid: int, seconds: float) -> Iterator[None]:
    """Stop a process for a while, soon."""

    def stop() -> None:
        time.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    yield
    stopper.join()


def test_an_engine_that_stands_still_is_told_and_goes_on(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """F39: swapped out, or held by a debugger."""
    session.run(SETUP, show=False)
    pid = session.status(show=False)[1].pid
    capsys.readouterr()
    code = "for turn in range(40):\n    time.sleep(0.05)\n    dist.barrier()"
    with standing_still(pid, 2.5):
        session.run(code, timeout=20)
    told = rows(capsys.readouterr().err)
    assert "0 calls barrier, waits for rank 1 3: dist.barrier()" in told
    assert any(line[0] == "1" and waiting.SILENT[0] in line for line in told)
    check_usable(session)


def test_c_code_that_holds_the_interpreter_is_told_with_its_line(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(SETUP, show=False)
    capsys.readouterr()
    code = """def search(): re.match("(a+)+b", "a" * 24)
if rank == 0:
    while time.monotonic() < until: search()
dist.barrier()
"""
    session.run("until = time.monotonic() + 3; import sys; sys.setswitchinterval(10)", show=False)
    session.run(code, timeout=20)
    session.run("sys.setswitchinterval(0.005)", show=False)
    assert f"0 {waiting.SILENT[1]} 1" in rows(capsys.readouterr().err)
    check_usable(session)
