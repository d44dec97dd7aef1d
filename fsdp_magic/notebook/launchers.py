"""KERNEL: launchers of a controller and of engines, whose processes a fork server may make."""

from __future__ import annotations

import copy
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher

from fsdp_magic.core.channel import CHANNEL_VARIABLE
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.forking import ForkRequest, Role
from fsdp_magic.core.protocol import LOCAL_ORDER_VARIABLE
from fsdp_magic.notebook.fork_server import ForkedProcess, ForkServer

_OWN_LOG = logging.getLogger(__name__)
_LOG_BYTES = 1 << 18
COMMAND = (sys.executable, "-P", "-m")
"""-P: no module of the person's that is called as one of Python's own takes its place."""


class _Forked:
    """What a launcher does differently if a fork server makes its process.

    Attributes:
        fork_server: makes the process; None, or if it cannot: it is started by itself.
        channel: the kernel's side of an engine's channel.
    """

    role: Role
    fork_server: ForkServer | None = None
    channel: socket.socket | None = None
    _forked: ForkedProcess | None = None
    _unrelated: int = 0
    """Bytes of its log that were written before its last cell."""

    def start(self: Any) -> None:
        """Make the process."""
        if self.fork_server is not None:
            with self._new_channel() as theirs:
                self._forked = self._fork(theirs)
        if self._forked is None:
            with self._new_channel() as theirs:
                self._spawn(theirs)
            return
        self.pid = self._forked.pid
        with suppress(psutil.NoSuchProcess):
            self.process = psutil.Process(self.pid)
        self.notify_start(self.pid)

    @contextmanager
    def _new_channel(self: Any) -> Iterator[socket.socket | None]:
        """Have the engine's side of a channel inside; a controller has none.

        An earlier one is closed: by that an engine ends that a fork server made too late.
        """
        self.close_channel()
        self.channel = None
        if self.role == "controller":
            yield None
            return
        self.channel, theirs = socket.socketpair()
        with theirs:
            yield theirs

    def close_channel(self) -> None:
        """Close the kernel's side of the channel; safe to call twice."""
        if self.channel is not None:
            self.channel.close()

    def _fork(self: Any, theirs: socket.socket | None) -> ForkedProcess | None:
        """Ask the fork server for the process."""
        self.loop  # noqa: B018  # found here, in its own thread
        request = ForkRequest(
            number=self.fork_server.next_number(),
            role=self.role,
            arguments=tuple(self.args[len(COMMAND) + 1 :]),
            environment={**os.environ, **self.get_env()},
            directory=os.path.abspath(self.work_dir),
            output=self.output_file,
            channel=theirs is not None,
        )
        answer = self.fork_server.fork(request, on_end=self._say_end, channel=theirs)
        if isinstance(answer, ForkedProcess):
            return answer
        if self.fork_server.killed:
            self.close_channel()
            raise FsdpError("the start was given up")
        _OWN_LOG.warning("engines are started one by one, which takes longer: %s", answer)
        return None

    def _spawn(self: Any, theirs: socket.socket | None) -> None:
        """Start the process by itself."""
        environment, passed = {**os.environ, **self.get_env()}, []
        if theirs is not None:
            passed = [theirs.fileno()]
            environment[CHANNEL_VARIABLE] = str(theirs.fileno())
        with open(self.output_file, "ab") as output:
            self._popen_process = subprocess.Popen(
                self.args,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=self.work_dir,
                pass_fds=passed,
                start_new_session=True,
            )
        self.pid = self._popen_process.pid
        self.process = psutil.Process(self.pid)
        self.notify_start(self.pid)
        self._start_waiting()

    def signal(self: Any, number: int) -> None:
        """Send the process a signal, if it is there."""
        if self._forked is not None:
            self._forked.send_signal(number)
            return
        with suppress(psutil.NoSuchProcess):
            super().signal(number)  # type: ignore[misc]  # of the launcher beside this class

    def _say_end(self: Any, exit_code: int | None) -> None:
        """Tell ipyparallel that the process has ended; runs in the fork server's thread."""
        data = {"exit_code": exit_code, "pid": self.pid, "identifier": self.identifier}
        with suppress(RuntimeError):  # the loop was closed: nobody wants to know
            self.loop.add_callback(self.notify_stop, data)

    def begin_cell(self: Any) -> None:
        """Leave out from now on what was written so far: it says nothing of an end to come."""
        with suppress(FileNotFoundError):
            self._unrelated = os.stat(self.output_file).st_size

    def get_output(self: Any, remove: bool = False) -> str:
        """Return the end of what the process has written in its last cell, whatever bytes."""
        path = Path(self.output_file)
        if self._output is None:
            with suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(max(self._unrelated, path.stat().st_size - _LOG_BYTES))
                self._output = file.read().decode(errors="replace")
        if remove:
            path.unlink(missing_ok=True)
        return self._output or ""

    async def join(self: Any, timeout: float | None = None) -> None:
        """Wait for the process to end."""
        if self._forked is None:
            await super().join(timeout)  # type: ignore[misc]  # of the launcher beside this class
        elif not self._forked.wait(timeout):
            raise TimeoutError(f"process {self.pid} did not end in {timeout} seconds")


class ControllerLauncher(_Forked, LocalControllerLauncher):  # type: ignore[misc]  # untyped
    """A local controller."""

    role = "controller"


class EngineLauncher(_Forked, LocalEngineLauncher):  # type: ignore[misc]  # untyped
    """A local engine that knows its place among the others."""

    role = "engine"

    def get_env(self) -> dict[str, str]:
        """Return the variables to set; the identifier is the engine's place."""
        return {**super().get_env(), LOCAL_ORDER_VARIABLE: self.identifier}


def fresh_engine(engine_set: Any, order: int, number: int) -> EngineLauncher:
    """Return a launcher, not started, for an engine in the place of one that ended.

    Source: ipyparallel's ``LocalEngineSetLauncher.start``, which starts a whole set.

    Args:
        engine_set: ipyparallel's set that the other one belonged to.
        order: its place among the engines of this host.
        number: of this replacement, so that its log is a file of its own.
    """
    log = f"ipengine-{engine_set.cluster_id}-{order}-{number}.log"
    launcher = engine_set.launcher_class(
        work_dir=engine_set.work_dir,
        parent=engine_set,
        log=engine_set.log,
        profile_dir=engine_set.profile_dir,
        cluster_id=engine_set.cluster_id,
        environment=engine_set.environment,
        identifier=str(order),
        output_file=os.path.join(engine_set.profile_dir, "log", log),
    )
    launcher.engine_cmd = copy.deepcopy(engine_set.engine_cmd)
    launcher.engine_args = copy.deepcopy(engine_set.engine_args)
    assert isinstance(launcher, EngineLauncher)
    return launcher
