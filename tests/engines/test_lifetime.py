"""How engines come and go: nothing is left behind, whoever is killed; nobody waits for ever."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import fsdp_magic
from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE
from fsdp_magic.core.specs import InitSpec
from fsdp_magic.core.units import MIB
from fsdp_magic.errors import EngineDiedError, FsdpError, OutOfMemoryOnRankError, UsageError
from fsdp_magic.notebook import sessions
from fsdp_magic.notebook.session import Session


def processes_of(kernel_pid: int) -> list[psutil.Process]:
    """Return the living processes that belong to a kernel: engines, watchers, controllers."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(KERNEL_PID_VARIABLE) == str(kernel_pid):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or a zombie
    return found


def directories() -> set[Path]:
    """Return the directories of clusters of this test run."""
    return set(Path(tempfile.gettempdir()).glob("fsdp_magic-*"))


def until(done: Callable[[], Any], *, seconds: float) -> bool:
    """Return whether something came true within a time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ---------------------------------------------------------------- init, restart, shutdown


@pytest.fixture
def no_current_session() -> Iterator[None]:
    yield
    current = sessions.current()
    if current is not None:
        current.shutdown()


@pytest.mark.usefixtures("no_current_session")
def test_init_twice_gives_the_same_session_until_a_restart_is_asked_for() -> None:
    first = fsdp_magic.init(n=1, device="cpu", show=False)
    assert fsdp_magic.init(n=1, device="cpu", show=False) is first
    assert fsdp_magic.init(show=False) is first  # nothing asked for: keep what there is
    with pytest.raises(UsageError, match="--restart"):
        fsdp_magic.init(n=2, device="cpu", show=False)
    with pytest.raises(UsageError, match="--restart"):
        fsdp_magic.init(n=1, device="cpu", seed=7, show=False)
    assert first.run("1", show=False)[0].result == "1"

    with pytest.raises(UsageError, match="found no GPU"):
        fsdp_magic.init(device="cuda", restart=True, show=False)
    assert first.alive, "what cannot be started costs nothing"
    pid = first.status(show=False)[0].pid
    second = fsdp_magic.init(n=1, device="cpu", restart=True, show=False)
    assert second is not first
    assert second.status(show=False)[0].pid != pid
    assert not psutil.pid_exists(pid)
    assert repr(first) == "<Session: 1 cpu engines, shut down>"


def test_shutdown_is_quick_leaves_nothing_and_can_be_said_twice() -> None:
    before = directories()
    with Session(InitSpec(n=2, device="cpu")) as session:
        directory = Path(session.engines.cluster.directory)
        pids = [status.pid for status in session.status(show=False)]
        assert directories() - before == {directory}
        started = time.monotonic()
    assert time.monotonic() - started < 1.5
    assert directories() == before
    assert not any(map(psutil.pid_exists, pids))
    session.shutdown()
    with pytest.raises(UsageError, match="%fsdp_init"):
        session.run("1", show=False)


def test_an_engine_that_dies_while_starting_is_an_error_with_both_numbers_and_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"""
import os, sys
if os.environ["FSDP_MAGIC_LOCAL_ORDER"] == "1":
    raise ImportError("no torch on this engine today")
sys.path.remove({str(tmp_path)!r})
del sys.modules["torch"]
import torch
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before, neighbours = directories(), {p.pid for p in processes_of(os.getpid())}
    with pytest.raises(FsdpError) as caught:
        Session(InitSpec(n=2, device="cpu"))
    assert "2 engines were asked for and 1 ended while starting" in str(caught.value)
    assert "no torch on this engine today" in str(caught.value)
    assert directories() == before
    assert until(lambda: {p.pid for p in processes_of(os.getpid())} <= neighbours, seconds=2.0)


# ---------------------------------------------------------------- an engine dies


def test_a_killed_engine_is_named_at_once_its_peers_are_released_and_a_restart_helps(
    session: Session,
) -> None:
    session.run("import os, torch.distributed as dist", show=False)
    code = "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()"
    started = time.monotonic()
    with pytest.raises(EngineDiedError) as caught:
        session.run(code, show=False)
    assert time.monotonic() - started < 3.0
    died = caught.value
    assert (died.rank, died.signal, died.host) == (1, signal.SIGKILL, os.uname().nodename)
    assert "rank 1" in str(died)
    assert "SIGKILL" in str(died)
    assert "%fsdp_restart" in str(died)
    assert len(str(died).splitlines()) == 1
    with pytest.raises(EngineDiedError):
        session.run("1", show=False)
    assert not session.alive

    session.restart()
    assert [o.result for o in session.run("rank", show=False)] == ["0", "1"]


def test_an_engine_that_dies_between_cells_is_named_by_the_next_one(session: Session) -> None:
    victim = session.status(show=False)[0].pid
    os.kill(victim, signal.SIGTERM)
    assert until(lambda: not psutil.pid_exists(victim), seconds=5.0)
    time.sleep(0.3)
    with pytest.raises(EngineDiedError) as caught:
        session.run("1", show=False)
    assert caught.value.rank == 0
    assert caught.value.signal is None, "it ended in order"


def test_an_engine_that_stands_still_for_seconds_is_still_there(session: Session) -> None:
    pids = [status.pid for status in session.status(show=False)]
    os.kill(pids[0], signal.SIGSTOP)
    try:
        time.sleep(5.0)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    code = "import torch.distributed as dist; dist.barrier(); rank"
    assert [output.result for output in session.run(code, show=False)] == ["0", "1"]
    assert [status.pid for status in session.status(show=False)] == pids


# ---------------------------------------------------------------- the kernel dies

KERNEL = """
import sys, time
import fsdp_magic
session = fsdp_magic.init(n=2, device="cpu", show=False)
print("ready", flush=True)
session.run(sys.argv[1], show=False)
time.sleep(100)
"""

DOING = {
    "nothing": "1",
    "python_and_c_that_holds_the_lock": """
import ctypes
if rank == 0:
    while True: pass
ctypes.PyDLL(None).sleep(100)
""",
    "without_their_fork_server": """
import os, time
if rank == 0: os.kill(os.getppid(), 9)
time.sleep(100)
""",
}


@pytest.fixture
def kernel() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that starts a kernel, whose engines will run some code."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, code], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def kill_and_look(process: subprocess.Popen[str], before: set[Path]) -> None:
    """Kill a kernel; everything of its must be gone two seconds later."""
    assert processes_of(process.pid)
    assert directories() - before
    process.kill()
    process.wait()
    gone = until(lambda: not processes_of(process.pid) and directories() == before, seconds=2.0)
    assert gone, (processes_of(process.pid), directories() - before)


@pytest.mark.parametrize("doing", DOING)
def test_nothing_outlives_a_kernel_killed_while_its_engines_do(
    doing: str, kernel: Callable[[str], subprocess.Popen[str]]
) -> None:
    before = directories()
    process = kernel(DOING[doing])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    kill_and_look(process, before)


@pytest.mark.parametrize(
    "seconds",
    [0.7, *(pytest.param(each, marks=pytest.mark.nightly) for each in (0.0, 1.5))],
)
def test_nothing_outlives_a_kernel_killed_while_its_engines_start(
    seconds: float, kernel: Callable[[str], subprocess.Popen[str]]
) -> None:
    before = directories()
    process = kernel("1")
    assert until(
        lambda: any(
            "fsdp_magic.engine" in " ".join(p.cmdline()) for p in processes_of(process.pid)
        ),
        seconds=20.0,
    )
    time.sleep(seconds)
    kill_and_look(process, before)


def test_nothing_outlives_a_kernel_that_ends_by_itself(
    kernel: Callable[[str], subprocess.Popen[str]],
) -> None:
    before = directories()
    process = kernel("raise SystemExit")
    process.wait(timeout=30)
    assert until(lambda: not processes_of(process.pid), seconds=2.0)
    assert directories() == before


# ---------------------------------------------------------------- who can reach it


def reachable_from_elsewhere(pids: list[int]) -> list[str]:
    """Return where processes listen, or are connected, beyond loopback."""
    found = []
    for pid in pids:
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            ends = [end.ip for end in (connection.laddr, connection.raddr) if end]
            if any(ip not in ("127.0.0.1", "::1") for ip in ends):
                found.append(f"{pid}: {connection.status} {ends}")
    return found


def test_nothing_listens_or_talks_beyond_loopback(session: Session) -> None:
    def pids() -> list[int]:
        return [os.getpid(), *(process.pid for process in processes_of(os.getpid()))]

    def listening() -> int:
        connections = [c for pid in pids() for c in psutil.Process(pid).net_connections("inet")]
        return sum(connection.status == "LISTEN" for connection in connections)

    assert listening() > 0, "the controller listens, on loopback"
    assert reachable_from_elsewhere(pids()) == []
    code = """
import torch, torch.distributed as dist
dist.all_reduce(torch.ones(3), group=dist.new_group([0, 1]))
dist.all_reduce(torch.ones(3))
"""
    session.run(code, show=False)
    assert reachable_from_elsewhere(pids()) == []
    with pytest.raises(FsdpError):
        session.run("if rank: raise ValueError('x')\ndist.barrier()", show=False)
    assert reachable_from_elsewhere(pids()) == []


def test_files_are_the_owners_only(session: Session) -> None:
    root = Path(session.engines.cluster.directory)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode) & 0o777  # a console makes directories sticky

    assert mode(root) == 0o700
    assert mode(root / "page") == 0o600
    connections = list(root.glob("security/*.json"))
    assert connections
    assert {mode(path) for path in connections} == {0o600}
    assert root.stat().st_uid == os.getuid()


def test_nothing_is_written_to_the_persons_own_profile(session: Session) -> None:
    directory = session.engines.cluster.directory
    opened = [
        file.path
        for process in processes_of(os.getpid())
        for file in process.open_files()
        if ".ipython" in file.path
    ]
    assert opened == []
    assert Path(directory, "log").is_dir()


# ---------------------------------------------------------------- a device of limited size


def test_a_memory_limit_makes_an_engine_run_out_and_go_on() -> None:
    def on_rank_0(size: int) -> str:
        return f"import torch\nx = torch.ones({size // 4}) if rank == 0 else None\ndel x"

    with Session(InitSpec(n=2, memory_limit="256MiB")) as session:
        assert session.status(show=False)[0].capacity_bytes == 256 * MIB
        session.run(on_rank_0(100 * MIB), show=False)
        for _ in range(2):
            with pytest.raises(OutOfMemoryOnRankError) as caught:
                session.run(on_rank_0(400 * MIB), show=False)
            assert caught.value.ranks == (0,)
        session.run(on_rank_0(100 * MIB), show=False)
        session.run("x = [torch.ones(50 * 2**18) for _ in range(3)]", show=False)
        session.run("import torch.distributed as dist; dist.barrier()", show=False)
        assert session.status(show=False)[0].allocated_bytes >= 150 * MIB
