"""KERNEL: the engines as processes: started, reached, watched, signalled and stopped.

An ipyparallel cluster with a profile directory of its own, readable by nobody else. Three things
differ from ipyparallel's defaults, each measured: engines import torch before they register; the
hub's heart beats every 200 ms, because a registration completes on a beat; and a missed beat
means nothing (an engine that stands still for seconds is alive): the operating system says when
a process has ended.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ipyparallel
from ipyparallel.error import RemoteError

from fsdp_magic.core.errors import EngineDiedError, FsdpError
from fsdp_magic.core.page import Page, page_bytes
from fsdp_magic.core.protocol import CALL_NAME, DIGESTS, KERNEL_PID_VARIABLE
from fsdp_magic.notebook.events import Answered, Died, Events, event_of
from fsdp_magic.notebook.launch import LoopThread, children, end, ipyparallel_cluster, process_of

_START_SECONDS = 120.0
_CRASH_LINES = 40
_OUTPUT_SECONDS = 2.0


class Cluster:
    """A controller and its engines.

    Args:
        n: number of engines.
        environment: variables for every engine, beside the kernel's own.

    Attributes:
        directory: a 0700 directory for the connection files, logs, rendezvous and page.
        page: the page shared with the engines.
    """

    def __init__(self, n: int, *, environment: Mapping[str, str]) -> None:
        self.n = n
        self.directory = tempfile.mkdtemp(prefix="fsdp_magic-")
        self.page = Page(_new_page(Path(self.directory, "page"), n))
        self._loop = LoopThread()
        self._events: Events | None = None
        self._dead: dict[int, int | None] = {}
        self._crashes: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._cluster = ipyparallel_cluster(self.directory, n)
        self._environment = {**environment, KERNEL_PID_VARIABLE: str(os.getpid())}
        self._client: Any = None
        self._stopped = False

    # -- life

    def start(self) -> None:
        """Start everything and wait until every engine has registered.

        Raises:
            FsdpError: if an engine ended or did not come in time; nothing is left behind.
        """
        try:
            self._loop.run(self._cluster.start_controller(environment=self._environment))
            self._loop.run(self._cluster.start_engines(self.n, environment=self._environment))
            self._client = self._connected()
            self._wait_for_engines()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process and remove every file; safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None
        launchers = [*self._engine_launchers(), self._cluster.controller]
        processes = [p for p in map(process_of, launchers) if p is not None]
        end([child for p in processes for child in children(p)] + processes)
        for launcher in launchers:
            if launcher is not None:  # its thread reports to the loop once more
                with suppress(TimeoutError):
                    self._loop.run(launcher.join(timeout=1))
        self._loop.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _connected(self) -> Any:
        info = self._loop.run(self._cluster.controller.get_connection_info())
        client = ipyparallel.Client(info["client"], profile_dir=self.directory, timeout=60)
        client.session.digest_history_size = DIGESTS
        return client

    def _wait_for_engines(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._client.ids) < self.n:
            logs = self._logs_of_ended()
            if logs:
                raise FsdpError(
                    f"{self.n} engines were asked for and {len(logs)} ended while starting; the "
                    f"end of the log:\n{logs[0]}"
                )
            if time.monotonic() > deadline:
                raise FsdpError(
                    f"{self.n} engines were asked for, {len(self._client.ids)} came within "
                    f"{_START_SECONDS:.0f} s; try %fsdp_init -n {max(1, len(self._client.ids))}"
                )
            time.sleep(0.01)

    def _engine_launchers(self) -> list[Any]:
        return [x for s in self._cluster.engines.values() for x in s.launchers.values()]

    def _logs_of_ended(self, lines: int = 12) -> list[str]:
        """Return the last lines of each engine that ended."""
        logs = [text for s in self._cluster.engines.values() for text in list(s.outputs.values())]
        return ["\n".join(log.splitlines()[-lines:]) for log in logs]

    # -- talking

    @property
    def engine_ids(self) -> list[int]:
        """The ids of the registered engines."""
        return sorted(self._client.ids)

    @property
    def client(self) -> Any:
        """The ipyparallel client, for a person who wants it."""
        return self._client

    def send(self, verb: str, requests: Mapping[int, Any]) -> Events:
        """Ask engines for a verb, all at once.

        Args:
            verb: what to do.
            requests: by engine id.

        Returns:
            Where everything that they then say arrives.
        """
        events: Events = Events()
        self._events = events
        for engine_id, request in requests.items():
            self._send(engine_id, verb, request, events)
        return events

    def _send(self, engine_id: int, verb: str, request: Any, events: Events) -> None:
        def hook(future: Any) -> None:
            future.iopub_callbacks.append(partial(self._hear, engine_id, events))

        name = self._client._engines.get(engine_id)
        if name is None:
            self._presume_dead(engine_id, events)
            return
        future = self._client.send_apply_request(
            self._client._mux_stream,  # not the bare socket: its stream would miss replies
            ipyparallel.Reference(CALL_NAME),
            args=(verb, request),
            ident=name.encode(),
            message_future_hook=hook,
        )
        future.add_done_callback(partial(self._answer, engine_id, events))

    def _hear(self, engine_id: int, events: Events, message: Mapping[str, Any]) -> None:
        """Take a message on an engine's publishing channel.

        ipyparallel has kept it too, with all that came before; we are done with that.
        """
        _publish(engine_id, message, events)
        kept = self._client.metadata.get(message["parent_header"]["msg_id"])
        if kept is not None:
            kept.update(stdout="", stderr="", outputs=[])

    def _answer(self, engine_id: int, events: Events, future: Any) -> None:
        """Pass a reply on once the engine's output is complete.

        It is when the engine says, on the channel of its output, that it is idle. That word can
        be lost where a reply cannot, so it is waited for a moment only.
        """
        passed = threading.Event()

        def pass_on(*_: Any) -> None:
            if not passed.is_set():
                passed.set()
                events.put(Answered(engine_id=engine_id, reply=future.result()))

        reply = future.result()
        with suppress(ValueError):  # a list that nobody else shortens
            self._client.history.remove(future.msg_id)
        if isinstance(reply, RemoteError) and reply.ename == "EngineError":
            self._presume_dead(engine_id, events)
        future.output.add_done_callback(pass_on)
        if not passed.is_set():
            self._loop.later(_OUTPUT_SECONDS, pass_on)

    def _presume_dead(self, engine_id: int, events: Events) -> None:
        """Count an engine as dead that the hub has given up.

        The operating system says within a moment how it ended; if it does not, the process may
        live but cannot be reached any more.
        """

        def say() -> None:
            events.put(Died(engine_id=engine_id, exit_code=self._dead.get(engine_id)))

        self._loop.later(_OUTPUT_SECONDS, say)

    def interrupt(self, engine_ids: list[int]) -> None:
        """Send SIGINT to engines."""
        for engine_id in engine_ids:
            pid = self._pids.get(engine_id)
            if pid is not None and engine_id not in self._dead:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    # -- watching

    def watch(self, pids: Mapping[int, int]) -> None:
        """Learn the engines' process ids, and from now on say when one ends."""
        self._pids.update(pids)
        identifiers = {x.pid: x for x in self._engine_launchers()}
        for engine_id, pid in pids.items():
            launcher = identifiers[pid]
            launcher.on_stop(partial(self._note_death, engine_id, launcher))

    @property
    def dead(self) -> set[int]:
        """The ids of the engines whose processes have ended."""
        return set(self._dead)

    def _note_death(self, engine_id: int, launcher: Any, data: Mapping[str, Any]) -> None:
        code = data.get("exit_code")
        self._dead[engine_id] = code
        self._crashes[engine_id] = _crash_report(launcher.get_output())
        if self._events is not None:
            self._events.put(Died(engine_id=engine_id, exit_code=code))

    def died(self, engine_id: int, *, rank: int | None) -> EngineDiedError:
        """Return the error that tells of an engine's death."""
        code = self._dead.get(engine_id)
        number = -code if code is not None and code < 0 else None
        crash = self._crashes.get(engine_id, "")
        how = f"exit code {code}" if number is None else signal.Signals(number).name
        how = "it cannot be reached" if code is None else how
        name = f"engine {engine_id}" if rank is None else f"rank {rank}"
        host = socket.gethostname()
        return EngineDiedError(
            f"{name} on {host} ended ({how}); type %fsdp_restart for fresh engines{crash}",
            rank=rank,
            host=host,
            signal=number,
        )


def _new_page(path: Path, world_size: int) -> memoryview:
    """Make the file of the shared page, for its owner only, and map it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    try:
        os.ftruncate(descriptor, page_bytes(world_size))
        return memoryview(mmap.mmap(descriptor, page_bytes(world_size))).cast("Q")
    finally:
        os.close(descriptor)


def _publish(engine_id: int, message: Mapping[str, Any], events: Events) -> None:
    """Turn a message on an engine's publishing channel into an event."""
    event = event_of(engine_id, message)
    if event is not None:
        events.put(event)


def _crash_report(log: str) -> str:
    """Return what the interpreter wrote when it crashed, as lines to add; empty if it did not."""
    start = log.find("Fatal Python error")
    return "" if start < 0 else "\n" + "\n".join(log[start:].splitlines()[:_CRASH_LINES])
