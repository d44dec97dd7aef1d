"""Guards around every test: it must leave the machine as it found it.

A process is ours if its environment holds the marker of this test run, so that neighbours on the
same machine are never mistaken for ours. Sessions that live longer than a test are registered in
``kept_sessions``; what belongs to them is not left over until the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

MARKER = "FSDP_MAGIC_TEST_RUN"
_GRACE_SECONDS = 2.0
_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that pytest, and torch at its import, set in the tests' own process."""


@pytest.fixture(scope="session", autouse=True)
def test_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mark everything that this run starts, give it a temporary directory, and look at the end."""
    tmp_path_factory.getbasetemp()  # pytest's own stays where it always is
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a shell starts background jobs so; an interrupt between our cells would be lost
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before, threads = dict(os.environ), set(threading.enumerate())
    directory = tempfile.mkdtemp(prefix="tests_of_fsdp_magic-")
    os.environ |= {MARKER: f"{os.getpid()}-{time.time_ns()}", "TMPDIR": directory}
    tempfile.tempdir = None
    yield os.environ[MARKER]
    left = {
        "processes": _until_empty(lambda: _processes(os.environ[MARKER], kept=())),
        "threads": [t.name for t in _new_threads(threads) if _is_ours(t) or not t.daemon],
        "ports": _listening(),
        "directories": _directories(directory, kept=()),
    }
    for name in (MARKER, "TMPDIR"):
        os.environ.pop(name, None)
    os.environ |= {"TMPDIR": before["TMPDIR"]} if "TMPDIR" in before else {}
    tempfile.tempdir = None
    shutil.rmtree(directory, ignore_errors=True)
    assert not any(left.values()), f"left behind by the whole run: {left}"


@pytest.fixture(scope="session")
def kept_sessions() -> list[Any]:
    """Sessions that live on after the test that started them."""
    return []


@pytest.fixture(autouse=True)
def _nothing_left(test_run: str, kept_sessions: list[Any]) -> Iterator[None]:
    """Fail a test that leaves a process, thread, port, variable or directory behind."""
    environment, threads = _environment(), set(threading.enumerate())
    directory, ports = os.environ["TMPDIR"], _listening()
    yield
    kept = {s.engines.cluster.directory for s in kept_sessions if s.running}
    changed = {
        name: (environment.get(name), os.environ.get(name))
        for name in environment.keys() | _environment().keys()
        if environment.get(name) != os.environ.get(name)
    }
    left = {
        "variables": changed,
        "processes": _until_empty(lambda: _processes(test_run, kept=kept)),
        "threads": [t.name for t in _new_threads(threads) if not t.daemon],
        "ports": sorted(set(_listening()) - set(ports)),
        "directories": _directories(directory, kept=kept),
    }
    assert not any(left.values()), f"left behind: {left}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that have come, but pytest-timeout's, which watches us."""
    new = [t for t in threading.enumerate() if t not in before]
    return [t for t in new if not t.name.startswith("pytest_timeout")]


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("fsdp_magic")


def _processes(marker: str, *, kept: Any) -> list[str]:
    """Return the living processes of this run, but those of kept sessions.

    Asked after every test, so it reads ``/proc`` itself, which takes a tenth of psutil's time.
    """
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read().split(b"\0")
            if f"{MARKER}={marker}".encode() not in environment:
                continue
            values = {entry.partition(b"=")[2].decode(errors="replace") for entry in environment}
            if values.isdisjoint(kept):
                found.append(f"{pid}: {' '.join(psutil.Process(int(pid)).cmdline())}")
        except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or somebody else's
    return found


def _listening() -> list[str]:
    """Return where this process listens."""
    connections = psutil.Process().net_connections(kind="inet")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == "LISTEN"]


def _directories(directory: str, *, kept: Any) -> list[str]:
    return [str(p) for p in Path(directory).glob("fsdp_magic-*") if str(p) not in kept]


def _until_empty(look: Any) -> list[str]:
    """Return what is still there after a moment."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
