"""The fork server: what its engines share, what they do not, and what happens without it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_magic.core.protocol import LOCAL_ORDER_VARIABLE
from fsdp_magic.core.specs import InitSpec
from fsdp_magic.errors import CellInterrupted, EngineDiedError, FsdpError, UsageError
from fsdp_magic.notebook.fork_server import ForkServer, _place
from fsdp_magic.notebook.session import Session


def until(done: Callable[[], Any], *, seconds: float) -> bool:
    """Return whether something came true within a time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def results(session: Session, code: str) -> list[str | None]:
    return [output.result for output in session.run(code, show=False)]


def have_run_first(code: str, directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Have every Python process that is started from now on run some code first."""
    (directory / "sitecustomize.py").write_text(code)
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def open_sockets() -> int:
    """Return how many sockets this process has open."""
    gc.collect()
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(x) and os.readlink(x).startswith("socket:") for x in links)


def server_pid(session: Session) -> int:
    assert session._server is not None
    return session._server.pid


def test_engines_are_children_of_one_server_which_a_restart_keeps(
    session: Session, tmp_path: Path
) -> None:
    session.restart()  # earlier tests may have ended the server, or changed what it depends on
    server = server_pid(session)
    (tmp_path / "module_of_a_person.py").write_text("import os\npid = os.getpid()\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import module_of_a_person, os"
    session.run(code, show=False)
    before = results(session, "(module_of_a_person.pid, os.getppid())")
    session.restart()
    assert server_pid(session) == server
    known = results(session, "import sys, os; 'module_of_a_person' in sys.modules")
    assert known == ["False", "False"], "what engines imported is gone with them"
    after = results(session, "(os.getpid(), os.getppid())")
    assert len({*before, *after}) == 4
    assert all(text is not None and text.endswith(f", {server})") for text in (*before, *after))


DIES_BEFORE_TELLING = """
import os, signal, sys

if "fsdp_magic.engine.fork_server" in sys.orig_argv:
    fork, made = os.fork, []

    def forked():
        pid = fork()
        if pid and sys._getframe(1).f_code.co_name == "_fork":
            made.append(pid)
            if len(made) == int(os.environ["DIES_AT"]):
                with open(os.environ["UNTOLD"], "w") as file:
                    file.write(str(pid))
                os.kill(os.getpid(), signal.SIGKILL)
        return pid

    os.fork = forked
"""


@pytest.mark.parametrize(("number", "role"), [(1, "controller"), (2, "engine")])
def test_nothing_is_left_of_what_a_server_made_and_died_before_telling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, role: str
) -> None:
    have_run_first(DIES_BEFORE_TELLING, tmp_path, monkeypatch)
    monkeypatch.setenv("DIES_AT", str(number))
    monkeypatch.setenv("UNTOLD", str(tmp_path / "untold"))
    with Session(InitSpec(n=1, device="cpu")) as session:
        assert results(session, "rank") == ["0"]
        untold = int((tmp_path / "untold").read_text())
        assert until(lambda: not psutil.pid_exists(untold), seconds=10.0), f"its {role} lives"


def test_a_start_that_fails_at_its_second_engine_closes_the_channel_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork = ForkServer.fork

    def refused(server: ForkServer, request: Any, **options: Any) -> Any:
        if request.environment.get(LOCAL_ORDER_VARIABLE) == "1":
            raise FsdpError("no second engine")
        return fork(server, request, **options)

    monkeypatch.setattr(ForkServer, "fork", refused)
    before = open_sockets()
    with pytest.raises(FsdpError, match="no second engine"):
        Session(InitSpec(n=2, device="cpu"))
    assert open_sockets() == before


def test_an_engine_that_a_server_made_too_late_ends(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    fork = ForkServer.fork

    def untold(server: ForkServer, request: Any, **options: Any) -> Any:
        if request.role != "engine":
            return fork(server, request, **options)
        answer = fork(server, request, **{**options, "on_end": lambda _: None})
        assert not isinstance(answer, str)
        made.append(answer.pid)
        return "the fork server ended"

    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "fork", untold)
        session.restart()
    assert results(session, "import os; os.getpid() in " + repr(made)) == ["False", "False"]
    assert len(made) == 2
    assert until(lambda: not any(map(psutil.pid_exists, made)), seconds=10.0)
    session.restart()


def test_chance_is_fresh_in_every_engine_and_sets_have_one_order(session: Session) -> None:
    codes = {
        "multiprocessing": "import multiprocessing; multiprocessing.current_process().authkey",
        "uuid": "import uuid; uuid.uuid4()",
        "tempfile": "import tempfile; tempfile.mktemp()",
        "ipyparallel": "get_ipython().kernel.session.session",
    }
    for name, code in codes.items():
        first, second = results(session, code)
        assert first != second, name
    assert len(set(results(session, "hash('a name')"))) == 1


@pytest.mark.nightly
def test_an_engine_has_the_kernels_place_at_the_time_it_is_started(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = "import os, sys; (os.environ.get('SAID_LATER'), os.getcwd(), sys.stdin.read())"
    here = os.getcwd()
    assert results(session, look) == [repr((None, here, ""))] * 2
    monkeypatch.setenv("SAID_LATER", "yes")
    monkeypatch.chdir(tmp_path)
    server = server_pid(session)
    session.restart()
    try:
        assert results(session, look) == [repr(("yes", str(tmp_path), ""))] * 2
        assert server_pid(session) != server, "its imports may have read what has changed"
    finally:
        monkeypatch.undo()
        session.restart()


@pytest.mark.nightly
def test_engines_outlive_their_server_and_their_own_end_is_still_seen_at_once(
    session: Session,
) -> None:
    server = server_pid(session)
    os.kill(server, signal.SIGKILL)
    assert until(lambda: not psutil.pid_exists(server), seconds=2.0)
    assert results(session, "import os, torch.distributed as dist; dist.barrier(); rank") == [
        "0",
        "1",
    ]
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match=r"rank 1 on .* ended \(SIGKILL"):
        session.run("if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()", show=False)
    assert time.monotonic() - started < 1.0
    session.restart()
    assert results(session, "import torch.distributed as dist; dist.barrier(); rank") == ["0", "1"]
    session.restart()
    assert server_pid(session) != server
    assert results(session, "rank") == ["0", "1"]


def beside_the_notebook(directory: Path) -> None:
    """Put modules into the notebook's directory."""
    for name in ("random", "queue", "tempfile"):
        (directory / f"{name}.py").write_text("raise RuntimeError('of the person')")
    (directory / "persons_module.py").write_text("value = 5")


@pytest.fixture
def threads_in_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        have_run_first(
            """
import sys, threading
if "fsdp_magic.engine.fork_server" in sys.orig_argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
""",
            tmp_path,
            patch,
        )
        yield


@pytest.mark.usefixtures("threads_in_the_server")
def test_without_a_server_that_can_fork_engines_are_started_by_themselves(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebook").mkdir()
    beside_the_notebook(tmp_path / "notebook")
    monkeypatch.chdir(tmp_path / "notebook")
    with Session(InitSpec(n=1, device="cpu")) as session:
        assert "2 threads are running in the fork server" in caplog.text
        assert results(session, "import os; (rank, os.getppid())") == [repr((0, os.getpid()))]
        assert results(session, "import persons_module; persons_module.value") == ["5"]
        died = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        with pytest.raises(EngineDiedError, match="SIGSEGV") as caught:
            session.run(died, show=False)
        assert "Fatal Python error" in str(caught.value)


def test_an_interrupt_while_engines_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbours = {p.pid for p in psutil.Process().children(recursive=True)}
    timer = signal.setitimer
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    timer(signal.ITIMER_REAL, 0.7)
    try:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            Session(InitSpec(n=2, device="cpu"))
        assert time.monotonic() - started < 2.5
    finally:
        timer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    left = {p.pid for p in psutil.Process().children(recursive=True)}
    assert left <= neighbours


@pytest.mark.nightly
def test_an_interrupt_while_engines_are_replaced_leaves_none_and_they_can_be_started(
    session: Session,
) -> None:
    left = []
    for seconds in (0.02, 0.3):  # while they end; while the next ones start
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(CellInterrupted, match="there are none now"):
            session.restart()
        timer.join()
        assert not session.running
        left.append(open_sockets())
        session.restart()
        assert results(session, "rank") == ["0", "1"]
    assert left[0] == left[1], "a channel of an engine that is not there any more"


def test_modules_beside_the_notebook_are_found_and_never_in_place_of_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside_the_notebook(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Session(InitSpec(n=1, device="cpu")) as session:
        assert results(session, "import os; os.getppid()") == [str(server_pid(session))]
        assert results(session, "import persons_module; persons_module.value") == ["5"]
        look = f"import sys; [p for p in sys.path if p in ('', {str(tmp_path)!r})]"
        assert results(session, look) == ["['']"]


def test_a_server_does_not_fit_once_other_packages_are_there(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    environment = {"PYTHONPATH": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages))
        places = [_place(environment)]
        assert places == [_place(environment)]
        for path in (packages / "new.py", packages / "new.pth", tmp_path / "sitecustomize.py"):
            path.write_text("")
            places.append(_place(environment))
        path.write_text("changed = 1")
        os.utime(path, ns=(1, 1))
        places.append(_place(environment))
    assert all(places.count(place) == 1 for place in places)


def test_a_directory_that_was_deleted_is_said_and_costs_no_engines(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for start in (session.restart, lambda: Session(InitSpec(n=1, device="cpu"))):
        with pytest.raises(UsageError, match="directory was deleted"):
            start()
    assert results(session, "rank") == ["0", "1"]


def test_a_server_that_cannot_be_started_or_used_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what earlier tests left
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="too long"):
        ForkServer({"TOO_LONG": "x" * (1 << 20)})
    server = ForkServer({})
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="directory was deleted"):
        Session(InitSpec(n=1, device="cpu"), server=server)
    monkeypatch.undo()
    assert set(os.listdir("/proc/self/fd")) == before
