"""``%fsdp_restart`` after a death: only what died is replaced, and everything works as before."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE
from fsdp_magic.errors import CellFailedError, CellInterrupted, EngineDiedError, FsdpError
from fsdp_magic.notebook import inspection, live, starting
from fsdp_magic.notebook.session import Session

KILL_RANK_1 = """
import os, torch.distributed as dist
if rank == 1: os.kill(os.getpid(), 9)
dist.barrier()
"""
MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
LOSS = "loss = model(torch.ones(2, 3) * (rank + 1)).square().mean()"


def results(session: Session, code: str) -> list[str | None]:
    return [output.result for output in session.run(code, show=False)]


def lose(session: Session, code: str = KILL_RANK_1) -> EngineDiedError:
    """Run a cell that ends an engine, and return the error."""
    with pytest.raises(EngineDiedError) as caught:
        session.run(code, show=False)
    return caught.value


def pids(session: Session) -> list[int]:
    return [status.pid for status in session.status(show=False)]


def ours() -> set[int]:
    """Return the processes that belong to this kernel."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.environ().get(KERNEL_PID_VARIABLE) == str(os.getpid()):
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


# ---------------------------------------------------------------- what is kept


def test_f6_what_died_is_replaced_and_the_others_keep_their_variables(session: Session) -> None:
    session.run("mine = rank + 1", show=False)
    before = pids(session)
    died = lose(session)
    assert "%fsdp_restart, which replaces it; the other keeps its variables" in str(died)

    started = time.monotonic()
    session.restart()
    assert time.monotonic() - started < 3.0, "a fork takes 0.3 s; a start anew takes more"
    after = pids(session)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert session.restarted == (
        "rank 1 has a fresh engine, rank 0 kept its variables; run the cells again that made "
        "those of rank 1"
    )
    assert results(session, "globals().get('mine'), rank, world_size") == [
        "(1, 0, 2)",
        "(None, 1, 2)",
    ]
    with pytest.raises(CellFailedError, match="run the cells again that made its variables"):
        session.run("mine", show=False)


def test_ranks_draw_alike_meet_in_collectives_and_count_groups_alike(session: Session) -> None:
    session.run("import torch, torch.distributed as dist; torch.rand(rank * 0 + 5)", show=False)
    session.run("only_here = dist.new_group([0, 1])", show=False)
    lose(session)
    session.restart()
    code = """
import random, torch, torch.distributed as dist
x = torch.tensor([float(rank + 1)])
dist.all_reduce(x)
dist.all_reduce(x, group=dist.new_group([0, 1]))
x.item(), torch.rand(1).item(), random.random()
"""
    first, second = results(session, code)
    assert first == second
    assert first is not None
    assert first.startswith("(6.0")
    with pytest.raises(CellFailedError) as caught:
        session.run("if rank == 0: dist.barrier(group=only_here)", show=False)
    assert str(caught.value) == (
        "rank 0: this process group was made before rank 1 had a fresh engine, which is not in "
        "it; make it again on every rank: dist.new_group()"
    )


def test_a_model_that_lost_shards_is_refused_until_it_is_built_again(session: Session) -> None:
    session.model(MODEL, show=False)
    expected = session.train(LOSS, steps=3, show=False).losses
    with pytest.raises(CellFailedError, match="The step is torn"):
        results(session, f"kept = model; {LOSS}\nloss.backward(); 1 / rank; optimizer.step()")
    lose(session)
    session.restart()
    assert session.restarted.endswith("; build `model` again in %%fsdp_model")
    line = "`model` is gone since %fsdp_restart; build it again in %%fsdp_model"
    for refused in (
        lambda: session.run("model.weight.sum()", show=False),
        lambda: session.train(LOSS, steps=3, show=False),
        lambda: session.eval(LOSS, show=False),
    ):
        with pytest.raises(CellFailedError) as caught:
            refused()
        assert str(caught.value) == line
    session.run(
        "def loss_of(model, batch):\n    return model(batch)", show=False
    )  # a name of its own
    session.run(MODEL, show=False)  # sharded where it is trained
    assert session.train(LOSS, steps=3, snapshot_every=2, show=False).losses == expected
    session.model(MODEL, show=False)
    assert session.train(LOSS, steps=3, show=False).losses == expected
    assert results(session, "tuple(model.weight.shape)") == ["(2, 3)"] * 2


def test_after_a_replacement_all_else_works(
    session: Session, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = session.client
    lose(session)
    session.restart()
    assert set(client[:].apply_sync(os.getpid)) == set(pids(session))
    assert sorted(client.ids)[-1] > 1, "the fresh engine has an id of its own"
    session.run("print('to be seen')")
    assert "[ranks 0-1] to be seen" in capfd.readouterr().out
    session.run("a_name_to_complete = 1", show=False)
    monkeypatch.setattr(inspection, "_COMPLETION_SECONDS", 10.0)
    found = session.completions("a_name_to_co")
    assert found is not None
    assert "a_name_to_complete" in str(found)
    assert "console --existing" in session.console(1)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(CellInterrupted):
        session.run("import time; time.sleep(60)", show=False)
    timer.join()
    assert lose(session, "import os\nif rank == 0: os._exit(3)").rank == 0
    session.restart()
    assert results(session, "rank") == ["0", "1"]


def test_status_tells_of_the_dead_and_of_those_who_live(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(session)
    assert [status.rank for status in session.status()] == [0]
    assert "rank 1 on" in capsys.readouterr().out
    session.restart()
    assert [status.rank for status in session.status(show=False)] == [0, 1]


# ---------------------------------------------------------------- how much is replaced


def test_a_restart_of_engines_in_order_gives_fresh_ones(session: Session) -> None:
    before = pids(session)
    session.restart()
    assert not set(pids(session)) & set(before)
    assert session.restarted == ""


def test_when_every_engine_died_all_are_fresh(session: Session) -> None:
    died = lose(session, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert "ranks 0-1 on" in str(died)
    assert "which starts fresh engines" in str(died)
    session.restart()
    assert results(session, "rank") == ["0", "1"]


def test_a_stuck_rank_is_replaced(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_STUCK_SECONDS", 0.5)
    before = pids(session)
    code = "import ctypes, time\nif rank == 1: ctypes.PyDLL(None).sleep(100)\nraise ValueError"
    with pytest.raises(FsdpError, match=r"rank 1 did not come out of the cell.*replaces it"):
        session.run(code, show=False)
    session.restart()
    after = pids(session)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert not psutil.pid_exists(before[1])


def test_if_replacing_fails_all_are_fresh_and_it_says_so(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pids(session)
    lose(session)
    with monkeypatch.context() as patched:
        patched.setattr(starting, "_FORK_SECONDS", 0.0)
        session.restart()
    assert not set(pids(session)) & set(before)
    assert session.restarted == (
        "every rank has a fresh engine, because no fresh engine came within 0 s"
    )


def test_a_killed_controller_costs_px_only_until_a_restart(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("mine = rank + 1", show=False)
    assert set(session.client[:].apply_sync(os.getpid)) == set(pids(session))
    controller = session.engines.cluster._processes.controller.process
    children = controller.children(recursive=True)
    os.kill(controller.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while session.engines.cluster.controller_death is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert session.engines.cluster.controller_death is not None

    for _ in range(2):
        assert results(session, "mine") == ["1", "2"]
        session.run("1")
    told = capsys.readouterr().err
    assert told.count("ipyparallel's controller ended (SIGKILL): %%px and session.client do") == 1
    with pytest.raises(FsdpError, match="until %fsdp_restart starts another one"):
        session.client  # noqa: B018
    _, left = psutil.wait_procs(children, timeout=10.0)
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]

    before = pids(session)
    session.restart()
    assert session.restarted == "there is another controller; every rank kept its variables"
    assert set(session.client[:].apply_sync(os.getpid)) == set(before)
    assert results(session, "mine") == ["1", "2"]
    lose(session)
    session.restart()
    assert set(session.client[:].apply_sync(os.getpid)) == set(pids(session))


def test_when_the_controller_died_too_all_are_fresh(session: Session) -> None:
    os.kill(session.engines.cluster._processes.controller.pid, signal.SIGKILL)
    lose(session)
    session.restart()
    assert session.restarted == (
        "every rank has a fresh engine, because the controller had ended, too"
    )
    assert results(session, "rank") == ["0", "1"]


def test_an_interrupt_while_replacing_leaves_nothing_half_started(session: Session) -> None:
    session.run("mine = rank + 1", show=False)
    lose(session)
    before = ours()
    assert session._server is not None
    server = session._server.pid
    os.kill(server, signal.SIGSTOP)  # it would be too quick to be interrupted
    timers = [
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)),
        threading.Timer(0.5, os.kill, (server, signal.SIGCONT)),
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(CellInterrupted, match="the others keep their variables"):
        session.restart()
    for timer in timers:
        timer.join()
    assert ours() <= before
    with pytest.raises(EngineDiedError):
        session.run("1", show=False)
    session.restart()
    assert results(session, "globals().get('mine')") == ["1", None]


def test_ten_replacements_leave_nothing_behind(session: Session) -> None:
    session.restart()
    resources: list[Any] = []
    for number in range(10):
        lose(session, f"import os\nif rank == {number % 2}: os.kill(os.getpid(), 9)")
        session.restart()
        if number in (1, 9):
            resources.append(
                (
                    len(os.listdir("/proc/self/fd")),
                    threading.active_count(),
                    len(ours()),
                    len(list(Path(session.engines.cluster.directory).rglob("*.log"))),
                )
            )
    # what earlier tests left to the garbage collector may go meanwhile
    assert all(last <= first for first, last in zip(*resources, strict=True)), resources
