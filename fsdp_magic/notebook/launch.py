"""KERNEL: how ipyparallel starts our processes, and how they are ended."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import LocalEngineSetLauncher
from traitlets.config import Config

from fsdp_magic.core.protocol import DIGESTS
from fsdp_magic.notebook.fork_server import ForkServer
from fsdp_magic.notebook.launchers import COMMAND, ControllerLauncher, EngineLauncher

_LOG = logging.getLogger(f"{__name__}.ipyparallel")
_LOG.setLevel(logging.CRITICAL)  # it repeats the engines' logs, which we show where they matter
_STOP_SECONDS = 2.0
_CHECK_SECONDS = 0.05
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
    # an engine does without the controller; a watcher, not a missed beat, ends it
    "--IPEngine.max_heartbeat_misses=0",
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

    def is_free(self, *, seconds: float) -> bool:
        """Return whether the loop takes something new within a time."""
        future = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        return bool(wait([future], timeout=seconds).done)

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
    config.LocalControllerLauncher.controller_cmd = [*COMMAND, "fsdp_magic.engine.controller"]
    config.LocalEngineSetLauncher.engine_cmd = [*COMMAND, "fsdp_magic.engine"]
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


def process_of(launcher: Any) -> psutil.Process | None:
    """Return the process that a launcher started, if it did and the process has not ended."""
    if launcher is None or launcher.state == "after":  # its id may be somebody else's by now
        return None
    process: psutil.Process | None = launcher.process
    return process


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
