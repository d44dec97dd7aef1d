"""KERNEL: the fork server as the kernel sees it: started, asked for processes, ended.

``engine/fork_server.py`` is its other side. One thread reads what it says. Every process comes
with a process descriptor, so a signal never hits another process that got its id.
"""

from __future__ import annotations

import os
import queue
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_magic.core.channel import ChannelClosedError, Frames, framed
from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.forking import EndedReport, ForkedReport, ForkRequest, RefusedReport
from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE
from fsdp_magic.notebook.exit_codes import exit_code_of_orphan

_CHUNK_BYTES = 1 << 16
_LOG_BYTES = 1 << 20
_START_SECONDS, _STOP_SECONDS = 120.0, 1.0
_PASSING = ("PYTEST_CURRENT_TEST",)
"""Variables that change all the time and that no import reads."""


class ForkedProcess:
    """A process that the fork server made.

    Args:
        pid: its process id.
        descriptor: its process descriptor, closed when it has ended.
        on_end: called once, with its exit code, or None if nobody can know it any more.
    """

    def __init__(self, pid: int, descriptor: int, on_end: Callable[[int | None], None]) -> None:
        self.pid = pid
        self.descriptor = descriptor
        self.exit_code: int | None = None
        self._on_end = on_end
        self._ended = threading.Event()
        self._closing = threading.Lock()

    def wait(self, seconds: float | None) -> bool:
        """Return whether it has ended within a time."""
        return self._ended.wait(seconds)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        with self._closing, suppress(ProcessLookupError):
            if self.descriptor >= 0:
                signal.pidfd_send_signal(self.descriptor, number)

    def end(self, exit_code: int | None) -> None:
        """Note that it has ended."""
        self.exit_code = exit_code
        self._ended.set()
        with self._closing:
            os.close(self.descriptor)
            self.descriptor = -1
        self._on_end(exit_code)


class ForkServer:
    """A process that has imported torch, and forks controllers and engines.

    Args:
        environment: variables of its engines, beside the kernel's own.

    Attributes:
        directory: a 0700 directory for its processes; removed when the server is stopped, or by
            its watcher once the kernel is gone.
        killed: whether it was told to end, so that nothing should be started in its place.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._wanted = _place(environment)
        self.directory = tempfile.mkdtemp(prefix="fsdp_magic-")
        self._log = os.memfd_create("fsdp_magic fork server")
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = self._started(theirs, environment)
        except BaseException:
            self._close()
            raise
        self._asked = 0
        self._closed = False
        self.killed = False
        self._processes: dict[int, ForkedProcess] = {}
        self._callbacks: dict[int, Callable[[int | None], None]] = {}
        self._answers: queue.Queue[ForkedProcess | str | None] = queue.Queue()
        self._thread = threading.Thread(
            target=self._read, name="fsdp_magic fork server", daemon=True
        )
        self._thread.start()

    def _started(
        self, theirs: socket.socket, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fsdp_magic.engine.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **environment,
                KERNEL_PID_VARIABLE: str(os.getpid()),
                "IPP_PROFILE_DIR": self.directory,
            },
            start_new_session=True,  # Jupyter interrupts the kernel's whole process group
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What it printed."""
        return os.pread(self._log, _LOG_BYTES, 0).decode(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return not self._closed and self._process.poll() is None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether it lives, and engines from it would be as if started now."""
        return self.alive and self._wanted == _place(environment)

    def fork(
        self,
        request: ForkRequest,
        *,
        on_end: Callable[[int | None], None],
        channel: socket.socket | None = None,
    ) -> ForkedProcess | str:
        """Make a process; waits until the server has imported what it needs.

        Args:
            request: what to make; its number comes from ``next_number``.
            on_end: called when it has ended, from the thread that reads; see ``ForkedProcess``.
            channel: the engine's side of its channel.

        Returns:
            The process, or why the server cannot make one.
        """
        self._callbacks[request.number] = on_end
        try:
            descriptors = [] if channel is None else [channel.fileno()]
            length, body = framed(request)
            socket.send_fds(self._control, [length], descriptors)
            self._control.sendall(body)
        except OSError:
            return f"the fork server ended:\n{self.log}"
        try:
            answer = self._answers.get(timeout=_START_SECONDS)
        except queue.Empty:
            self._process.kill()  # what it made later would be taken for the next one
            return f"the fork server was not ready within {_START_SECONDS:.0f} s"
        return answer or f"the fork server ended:\n{self.log}"

    def next_number(self) -> int:
        """Return a number for a request."""
        self._asked += 1
        return self._asked

    def kill(self) -> None:
        """End the server at once, also while it starts; its processes live on."""
        self.killed = True
        self._process.kill()

    def stop(self) -> None:
        """End the server and remove the directory, once its processes have been ended."""
        self.kill()
        self._process.wait()
        self._thread.join(timeout=_STOP_SECONDS)
        self._close()

    def _close(self) -> None:
        self._control.close()
        os.close(self._log)
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- the thread that reads

    def _read(self) -> None:
        frames = Frames()
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._control, _CHUNK_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
                for report in frames.add(data):
                    self._take(report, descriptors)
            except (OSError, ChannelClosedError):
                break
        self._closed = True
        self._answers.put(None)
        self._process.wait()
        self._watch_orphans()

    def _take(self, report: Any, descriptors: list[int]) -> None:
        match report:
            case ForkedReport(number=number, pid=pid):
                process = ForkedProcess(pid, descriptors.pop(), self._callbacks.pop(number))
                self._processes[number] = process
                self._answers.put(process)
            case RefusedReport(reason=reason):
                self._answers.put(reason)
            case EndedReport(number=number, exit_code=exit_code):
                self._processes.pop(number).end(exit_code)

    def _watch_orphans(self) -> None:
        """Say when and how the processes end that live on after the server."""
        poll = select.poll()
        left = {process.descriptor: process for process in self._processes.values()}
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                process = left.pop(descriptor)
                process.end(exit_code_of_orphan(process.pid, descriptor))


_Place = tuple[dict[str, str], str, frozenset[tuple[str, int]]]


def _place(environment: Mapping[str, str]) -> _Place:
    """Return what the imports of an engine may depend on.

    Each engine gets its own environment anyway; but what torch and others read when they are
    imported, they read in the fork server.
    """
    wanted = {**os.environ, **environment}
    variables = {k: v for k, v in wanted.items() if k not in _PASSING}
    return variables, kernel_directory(), _packages(variables)


def _packages(variables: Mapping[str, str]) -> frozenset[tuple[str, int]]:
    """Return what tells that packages came, went or changed: files and folders, with their times.

    A package that is installed changes its folder; one that is installed to be edited, and what
    Python runs when it starts, are files there.
    """
    added = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    known = [path for path in sys.path if path.endswith("-packages")]
    installed = {*known, *site.getsitepackages(), site.getusersitepackages()}
    found = [Path(path) for path in installed]
    found += [file for path in installed for file in Path(path).glob("*.pth")]
    found += [
        Path(path, f"{name}.py")
        for path in {*added, *sys.path}
        for name in ("sitecustomize", "usercustomize")
    ]
    times = set()
    for path in found:
        with suppress(OSError):  # it is not there
            times.add((str(path), path.stat().st_mtime_ns))
    return frozenset(times)


def kernel_directory() -> str:
    """Return the kernel's directory, where engines are started.

    Raises:
        UsageError: if it was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the notebook's directory was deleted, and engines are started there; go to another "
            "one first: type %cd DIRECTORY"
        ) from None
