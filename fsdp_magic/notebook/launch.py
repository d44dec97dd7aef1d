"""KERNEL: how ipyparallel starts our processes, and how they are ended."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import (
    LocalControllerLauncher,
    LocalEngineLauncher,
    LocalEngineSetLauncher,
)
from traitlets.config import Config

from fsdp_magic.core.channel import CHANNEL_VARIABLE
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.forking import ForkRequest, Role
from fsdp_magic.core.protocol import DIGESTS, LOCAL_ORDER_VARIABLE
from fsdp_magic.notebook.fork_server import ForkedProcess, ForkServer

_LOG = logging.getLogger(f"{__name__}.ipyparallel")
_LOG.setLevel(logging.CRITICAL)  # it repeats the engines' logs, which we show where they matter
_OWN_LOG = logging.getLogger(__name__)
_STOP_SECONDS = 2.0
_CHECK_SECONDS = 0.05
_COMMAND = (sys.executable, "-P", "-m")
"""-P: no module of the person's that is called as one of Python's own takes its place."""
_Result = TypeVar("_Result")

CONTROLLER_ARGUMENTS = (
    "--ip=127.0.0.1",
    "--location=127.0.0.1",
    "--nodb",
    "--HeartMonitor.period=200",
    "--HeartMonitor.max_heartmonitor_misses=100000",
    "--IPController.broadcast_scheduler_depth=0",
    f"--Session.digest_history_size={DIGESTS}",
)


ENGINE_ARGUMENTS = (
    "--IPEngine.wait_for_url_file=60",
    # the kernel signals engines and tells the hub of their ends; a process each does not have to
    "--IPEngine.enable_nanny=False",
)


class LoopThread:
    """An event loop that never stops, for ipyparallel's launchers, which call back on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fsdp_magic launchers", daemon=True
        )
        self._thread.start()

    def run(
        self, coroutine: Coroutine[Any, Any, _Result], *, check: Callable[[], None] | None = None
    ) -> _Result:
        """Run a coroutine on the loop, and wait for its result.

        Args:
            coroutine: what to run.
            check: called some twenty times a second; what it raises gives the coroutine up.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while check is not None and not wait([future], timeout=_CHECK_SECONDS).done:
                check()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call something on the loop after a time."""
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, callback)

    def stop(self) -> None:
        """End the loop and its thread; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
            self._loop.close()


def ipyparallel_cluster(directory: str, n: int, server: ForkServer | None) -> Any:
    """Return ipyparallel's cluster of our controller and engines, not started.

    Args:
        directory: its profile, ours alone, so that nothing of the person's own is read or written.
        n: number of engines.
        server: makes the processes; None: each is started by itself.
    """
    config = Config()
    config.LocalControllerLauncher.controller_cmd = [*_COMMAND, "fsdp_magic.engine.controller"]
    config.LocalEngineSetLauncher.engine_cmd = [*_COMMAND, "fsdp_magic.engine"]
    config.LocalEngineSetLauncher.engine_args = list(ENGINE_ARGUMENTS)
    config.LocalEngineSetLauncher.delay = 0.0

    class Controller(ControllerLauncher):
        fork_server = server

    class Engine(EngineLauncher):
        fork_server = server

    class Engines(LocalEngineSetLauncher):  # type: ignore[misc]  # ipyparallel is untyped
        launcher_class = Engine

    return ipyparallel.Cluster(
        n=n,
        config=config,
        load_profile=False,
        profile_dir=directory,
        cluster_file="",
        controller_args=list(CONTROLLER_ARGUMENTS),
        controller_launcher_class=Controller,
        engine_launcher_class=Engines,
        delay=0.0,
        send_engines_connection_env=False,
        shutdown_atexit=False,
        log=_LOG,
    )


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

    def start(self: Any) -> None:
        """Make the process."""
        if self.role == "controller":
            self._make(None)
            return
        self.channel, theirs = socket.socketpair()
        with theirs:
            self._make(theirs)

    def close_channel(self) -> None:
        """Close the kernel's side of the channel; safe to call twice."""
        if self.channel is not None:
            self.channel.close()

    def _make(self: Any, theirs: socket.socket | None) -> None:
        self._forked = None if self.fork_server is None else self._fork(theirs)
        if self._forked is None:
            self._spawn(theirs)
            return
        self.pid = self._forked.pid
        with suppress(psutil.NoSuchProcess):
            self.process = psutil.Process(self.pid)
        self.notify_start(self.pid)

    def _fork(self: Any, theirs: socket.socket | None) -> ForkedProcess | None:
        """Ask the fork server for the process."""
        self.loop  # noqa: B018  # found here, in its own thread
        request = ForkRequest(
            number=self.fork_server.next_number(),
            role=self.role,
            arguments=tuple(self.args[len(_COMMAND) + 1 :]),
            environment={**os.environ, **self.get_env()},
            directory=os.path.abspath(self.work_dir),
            output=self.output_file,
            channel=theirs is not None,
        )
        answer = self.fork_server.fork(request, on_end=self._say_end, channel=theirs)
        if isinstance(answer, ForkedProcess):
            return answer
        if self.fork_server.killed:
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


def process_of(launcher: Any) -> psutil.Process | None:
    """Return the process that a launcher started, if it did."""
    return launcher.process if launcher is not None and launcher.process is not None else None


def children(process: psutil.Process) -> list[psutil.Process]:
    """Return every process below one."""
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def end(processes: list[psutil.Process]) -> None:
    """End processes: asked first, killed after a moment.

    Waited for by descriptor: a process that is not our child stays in the process table until
    its parent looks, and that can take a second.
    """
    with ExitStack() as opened:
        left: list[int] = []
        for process in processes:
            with suppress(ProcessLookupError):
                left.append(os.pidfd_open(process.pid))
                opened.callback(os.close, left[-1])
        for number in (signal.SIGTERM, signal.SIGKILL):
            for descriptor in left:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
            left = _alive(left, seconds=_STOP_SECONDS)


def _alive(descriptors: list[int], *, seconds: float) -> list[int]:
    """Return the processes that have not ended after a time, which is cut short if all have."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    left, deadline = set(descriptors), time.monotonic() + seconds
    while left and (rest := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(rest * 1000):
            poll.unregister(descriptor)
            left.discard(descriptor)
    return list(left)
