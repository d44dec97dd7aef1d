"""KERNEL: the engines as processes: started, reached, watched, signalled and stopped.

An ipyparallel cluster with a profile directory of its own, readable by nobody else. Four things
differ from ipyparallel's defaults, each measured: a fork server makes the processes; our verbs
take a channel straight to each engine, which is ready before ipyparallel's client could know it;
the hub's heart beats every 200 ms, because a registration completes on a beat; and a missed beat
means nothing (an engine that stands still for seconds is alive): the operating system says when
a process has ended.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_magic.core.channel import Asked, Finished, Published, Ready, Unreadable
from fsdp_magic.core.errors import CellInterrupted, EngineDiedError, FsdpError
from fsdp_magic.core.page import Page
from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE, HelloReport
from fsdp_magic.core.wording import as_typed
from fsdp_magic.notebook.channel import Channels
from fsdp_magic.notebook.cluster_files import crash_report, death, empty, last_lines, new_page
from fsdp_magic.notebook.controller_road import ControllerRoad, connected, tell_of_end
from fsdp_magic.notebook.events import Answered, Died, Events, event_of
from fsdp_magic.notebook.fork_server import ForkServer
from fsdp_magic.notebook.launch import LoopThread, children, end, ipyparallel_cluster, process_of
from fsdp_magic.notebook.live import Interruptions

_START_SECONDS, _LOOK_SECONDS = 120.0, 0.05


class Cluster:
    """A controller and its engines.

    Args:
        n: number of engines.
        environment: variables for every engine, beside the kernel's own.
        server: makes the processes; None: each is started by itself.
        interruptions: hold interrupts back while this starts and stops.

    Attributes:
        directory: a 0700 directory for the connection files, logs, rendezvous and page.
        page: the page shared with the engines.
        lost: what the last request lost of what engines said; None: nothing.
    """

    def __init__(
        self,
        n: int,
        *,
        environment: Mapping[str, str],
        server: ForkServer | None = None,
        interruptions: Interruptions | None = None,
    ) -> None:
        self.n = n
        self._server = server
        self._interruptions = interruptions or Interruptions()
        self.directory = tempfile.mkdtemp(prefix="fsdp_magic-") if not server else server.directory
        empty(self.directory)
        self.page = Page(new_page(Path(self.directory, "page"), n))
        self._loop = LoopThread()
        self._events: Events | None = None
        self._number = 0
        self.lost: FsdpError | None = None
        self._dead: dict[int, int | None] = {}
        self._crashes: dict[int, str] = {}
        self._ready: dict[int, Ready] = {}
        self._orders: dict[int, int] = {}
        self._launchers: dict[int, Any] = {}
        self._changed = threading.Event()
        self._channels = Channels(self._hear, self._note_loss)
        self._cluster = ipyparallel_cluster(self.directory, n, server)
        self._environment = {**environment, KERNEL_PID_VARIABLE: str(os.getpid())}
        self._client: Any = None
        self._stopped = False

    # -- life

    def start(self) -> None:
        """Start everything and wait until every engine is ready.

        Raises:
            FsdpError: if an engine ended or did not come in time; nothing is left behind.
            CellInterrupted: if the person gave it up; nothing is left behind.
        """
        starts = self._cluster.start_controller, partial(self._cluster.start_engines, self.n)
        try:
            for start in starts:
                self._loop.run(start(environment=self._environment), check=self.check_interrupted)
            self._launchers = {int(x.identifier): x for x in self._started_engines()}
            for launcher in (*self._launchers.values(), self._cluster.controller):
                launcher.on_stop(lambda _: self._changed.set())
            self._channels.start({order: x.channel for order, x in self._launchers.items()})
            self._wait_for_engines()
        except BaseException:
            if self._server is not None:
                self._server.kill()  # else an interrupt would wait until it has started
            self.stop()
            raise

    def stop(self) -> None:
        """End every process and remove every file; safe to call twice."""
        if self._stopped:
            return
        with self._interruptions, ExitStack() as steps:  # the last that is named comes first
            steps.callback(setattr, self, "_stopped", True)
            steps.callback(self._remove_files)
            steps.callback(self._loop.stop)
            steps.callback(self._close_channels)
            steps.callback(self._end_processes)
            steps.callback(self._close_client)

    def check_interrupted(self) -> None:
        """Raise if the person interrupted since the interruptions began to be held back."""
        if self._interruptions.count:
            raise CellInterrupted(
                "interrupted while the engines started; there are none now: type %fsdp_init"
            )

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close(linger=0)

    def _end_processes(self) -> None:
        self._loop.run(asyncio.sleep(0))  # a start that was interrupted starts no more after this
        engines = self._started_engines()
        launchers = [*engines, self._cluster.controller]
        processes = [p for p in map(process_of, launchers) if p is not None]
        end([child for p in processes for child in children(p)] + processes)
        for launcher in launchers:
            if launcher is not None:  # its thread reports to the loop once more
                with suppress(TimeoutError):
                    self._loop.run(launcher.join(timeout=1))

    def _close_channels(self) -> None:
        self._channels.close()
        for launcher in self._started_engines():
            launcher.close_channel()

    def _remove_files(self) -> None:
        if self._server is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            empty(self.directory)

    def _wait_for_engines(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ready) < self.n:
            self._changed.wait(timeout=_LOOK_SECONDS)
            self._changed.clear()
            self.check_interrupted()
            controller = self._cluster.controller
            if controller.state == "after":
                raise FsdpError(
                    f"the controller ended while starting: {controller.stop_data}; the end of its "
                    f"log:\n{last_lines(controller.get_output())}"
                )
            logs = self._logs_of_ended()
            if logs:
                raise FsdpError(
                    f"{self.n} engines were asked for and {len(logs)} ended while starting; the "
                    f"end of the log:\n{logs[0]}"
                )
            if time.monotonic() > deadline:
                raise FsdpError(
                    f"{self.n} engines were asked for, {len(self._ready)} came within "
                    f"{_START_SECONDS:.0f} s; try %fsdp_init -n {max(1, len(self._ready))}"
                )

    def _started_engines(self) -> list[Any]:
        return [x for s in self._cluster.engines.values() for x in s.launchers.values()]

    def _logs_of_ended(self) -> list[str]:
        """Return the last lines of each engine that ended."""
        sets = self._cluster.engines.values()
        return [last_lines(text) for s in sets for text in list(s.outputs.values())]

    # -- talking

    @property
    def hellos(self) -> dict[int, HelloReport]:
        """Who the engines are, by engine id."""
        return {ready.engine_id: ready.hello for ready in self._ready.values()}

    @property
    def client(self) -> Any:
        """The ipyparallel client, for a person who wants it; connected when first asked for."""
        if self._client is None:
            info = self._loop.run(self._cluster.controller.get_connection_info())
            self._client = connected(info["client"], self.directory, count=self.n, dead=self._dead)
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
        self._number += 1
        self._events, self.lost = events, None
        for engine_id, request in requests.items():
            order = self._orders.get(engine_id)
            if order is None or self._client_waits:
                road = ControllerRoad(self.client, self._loop)
                road.send(engine_id, verb, request, events)
            else:
                asked = Asked(number=self._number, verb=verb, request=request)
                self._channels.send(order, asked)
        return events

    @property
    def _client_waits(self) -> bool:
        """Whether a ``%%px`` that came first is under way: the channel would overtake it."""
        return self._client is not None and bool(self._client.outstanding)

    def _hear(self, order: int, message: Any) -> None:
        """Take what an engine says on its channel; runs in the thread that reads."""
        if isinstance(message, Ready):
            self._ready[order] = message
            self._orders[message.engine_id] = order
            self._changed.set()
            return
        if isinstance(message, Unreadable):
            raise ValueError(message.reason)
        events = self._events
        if events is None or message.number != self._number:
            return  # of a request that nobody follows any more
        engine_id = self._ready[order].engine_id
        match message:
            case Published():
                event = event_of(engine_id, message.message())
                if event is not None:
                    events.put(event)
            case Finished():
                events.put(Answered(engine_id=engine_id, reply=message.answer()))

    def _note_loss(self, order: int, message: Any, error: Exception) -> None:
        """Note that something an engine said could not be taken; in the thread that reads.

        The request fails once every engine has answered it; one whose answer it may have been
        has none to wait for.
        """
        self.lost = FsdpError(
            f"what engine {order} sent cannot be read in the notebook: {as_typed(str(error))}; "
            "the engines are in order, and go on with the next cell"
        )
        events, ready = self._events, self._ready.get(order)
        if events is not None and ready is not None and not isinstance(message, Published):
            events.put(Answered(engine_id=ready.engine_id, reply=self.lost))

    def interrupt(self, engine_ids: list[int]) -> None:
        """Send SIGINT to engines."""
        for engine_id in engine_ids:
            if engine_id not in self._dead:
                self._launcher(engine_id).signal(signal.SIGINT)

    def _launcher(self, engine_id: int) -> Any:
        return self._launchers[self._orders[engine_id]]

    # -- watching

    def watch(self) -> None:
        """Say from now on when an engine ends."""
        for engine_id in self.hellos:
            launcher = self._launcher(engine_id)
            launcher.on_stop(partial(self._note_death, engine_id, launcher))

    @property
    def dead(self) -> set[int]:
        """The ids of the engines whose processes have ended."""
        return set(self._dead)

    def _note_death(self, engine_id: int, launcher: Any, data: Mapping[str, Any]) -> None:
        code = data.get("exit_code")
        self._dead[engine_id] = code
        self._crashes[engine_id] = crash_report(launcher.get_output())
        if self._events is not None:
            self._events.put(Died(engine_id=engine_id, exit_code=code))
        if self._client is not None:
            tell_of_end(self._client, engine_id)

    def died(self, engine_id: int, *, rank: int) -> EngineDiedError:
        """Return the error that tells of the death of a rank's engine."""
        return death(rank, self._dead.get(engine_id), self._crashes.get(engine_id, ""))
