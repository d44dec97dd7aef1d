"""KERNEL: the engines as a cluster: started, reached, watched, signalled, replaced and stopped.

An ipyparallel cluster with a profile directory of its own, readable by nobody else. Four things
differ from ipyparallel's defaults, each measured: a fork server makes the processes; our verbs
take a channel straight to each engine, which is ready before ipyparallel's client could know it;
the hub's heart beats every 200 ms, because a registration completes on a beat; and a missed beat
means nothing (an engine that stands still for seconds is alive): the operating system says when
a process has ended.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fsdp_magic.core.channel import Asked, Ready, Unreadable
from fsdp_magic.core.errors import CellInterrupted, FsdpError
from fsdp_magic.core.page import Page
from fsdp_magic.core.reply import HelloReport
from fsdp_magic.notebook.channel import Channels
from fsdp_magic.notebook.cluster_files import empty, new_page
from fsdp_magic.notebook.controller_road import Client, ControllerRoad
from fsdp_magic.notebook.conversation import Conversation
from fsdp_magic.notebook.deaths import Death, controller_ended
from fsdp_magic.notebook.events import Events
from fsdp_magic.notebook.fork_server import ForkServer
from fsdp_magic.notebook.live import Interruptions
from fsdp_magic.notebook.processes import Processes
from fsdp_magic.notebook.starting import replacement_check, start_check
from fsdp_magic.notebook.watch import Watch

_KILL_SECONDS, _LOOK_SECONDS = 2.0, 0.05


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
        self._conversation = Conversation()
        self._ready: dict[int, Ready] = {}
        self._orders: dict[int, int] = {}
        self._changed = threading.Event()
        self._channels = Channels(self._hear, self._note_loss)
        self._processes = Processes(
            n, directory=self.directory, environment=environment, server=server
        )
        self._client = Client(self._processes, self.directory)
        self._watch = Watch(
            on_death=self._note_death,
            on_controller_death=lambda: self._client.note_controller_end(self._living),
        )
        self._stopped = False

    # -- life

    def start(self) -> None:
        """Start everything and wait until every engine is ready.

        Raises:
            FsdpError: if an engine ended or did not come in time; nothing is left behind.
            CellInterrupted: if the person gave it up; nothing is left behind.
        """
        engines = self._processes.engines
        try:
            self._processes.start(check=self.check_interrupted, on_end=self._note_change)
            engines = self._processes.engines
            self._channels.start({order: x.channel for order, x in engines.items()})
            self._wait_for(
                engines,
                check=start_check(
                    self._processes, n=self.n, ready=self._ready, interrupted=self.check_interrupted
                ),
            )
        except BaseException:
            if self._server is not None:
                self._server.kill()  # else an interrupt would wait until it has started
            self.stop()
            raise

    def replace(self, engine_ids: Collection[int]) -> dict[int, int]:
        """Start a fresh engine in the place of each that has ended.

        Args:
            engine_ids: of those that have.

        Returns:
            The id of each fresh engine, by that of the one whose place it took.

        Raises:
            FsdpError: if they did not come in time; none of the fresh ones is left.
            CellInterrupted: if the person gave it up; likewise.
        """
        places = {self._orders[engine_id]: engine_id for engine_id in engine_ids}
        ended = {order: self._ready.pop(order) for order in places}
        fresh: dict[int, Any] = {}
        forked = self._server is not None and self._server.alive
        check = replacement_check(fresh, self._interruptions, forked=forked)
        try:
            self._processes.start_fresh(places, fresh, check=check, on_end=self._note_change)
            for order, launcher in fresh.items():
                self._channels.replace(order, launcher.channel)
            self._wait_for(places, check=check)
            self._refuse_known(self._ready[order].engine_id for order in places)
        except BaseException:
            try:
                self._processes.give_up(fresh.values())
            finally:
                for order, launcher in fresh.items():
                    if launcher.channel is not None:
                        self._channels.replace(order, launcher.channel)  # to be closed there
                self._ready.update(ended)
            raise
        self._processes.engines.update(fresh)
        for engine_id in engine_ids:
            del self._orders[engine_id]
        self._client.wait_for(self._living)
        return {engine_id: self._ready[order].engine_id for order, engine_id in places.items()}

    def replace_controller(self) -> None:
        """Start a controller in the place of one that has ended; engines find it by themselves."""
        self._client.close()
        self._processes.restart_controller(check=self.check_interrupted)
        self._watch.controller(self._processes.controller)

    def kill(self, engine_ids: Collection[int]) -> None:
        """End engines at once, and wait until they have ended."""
        for engine_id in engine_ids:
            self._launcher(engine_id).signal(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECONDS
        while not self._watch.deaths.keys() >= set(engine_ids) and time.monotonic() < deadline:
            self._changed.wait(timeout=_LOOK_SECONDS)
            self._changed.clear()

    def stop(self) -> None:
        """End every process and remove every file; safe to call twice."""
        if self._stopped:
            return
        with self._interruptions, ExitStack() as steps:  # the last that is named comes first
            steps.callback(setattr, self, "_stopped", True)
            steps.callback(self._remove_files)
            steps.callback(self._watch.close)
            steps.callback(self._processes.loop.stop)
            steps.callback(self._processes.close_channels)
            steps.callback(self._channels.close)
            steps.callback(self._processes.end)
            steps.callback(self._client.close)

    def check_interrupted(self) -> None:
        """Raise if the person interrupted since the interruptions began to be held back."""
        if self._interruptions.count:
            raise CellInterrupted(
                "interrupted while the engines started; there are none now: type %fsdp_init"
            )

    def _remove_files(self) -> None:
        if self._server is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            empty(self.directory)

    def _wait_for(self, orders: Collection[int], *, check: Callable[[], None]) -> None:
        """Wait until the engines in some places are ready; ``check`` may give it up."""
        while not self._ready.keys() >= set(orders):
            self._changed.wait(timeout=_LOOK_SECONDS)
            self._changed.clear()
            check()

    def _refuse_known(self, engine_ids: Iterable[int]) -> None:
        """Raise if a controller that was replaced gave fresh engines numbers of earlier ones."""
        if self._watch.known & set(engine_ids):
            raise FsdpError("the controller gave a fresh engine the number of an earlier one")

    def _note_change(self, _: Any) -> None:
        self._changed.set()

    # -- talking

    @property
    def hellos(self) -> dict[int, HelloReport]:
        """Who the engines are, by engine id."""
        return {ready.engine_id: ready.hello for ready in self._ready.values()}

    @property
    def client(self) -> Any:
        """The ipyparallel client, for a person who wants it; connected when first asked for.

        Raises:
            FsdpError: if the controller has ended.
        """
        if self.controller_death is not None:
            raise controller_ended(self.controller_death)
        return self._client.get(living=self._living, dead=self._watch.deaths)

    @property
    def _living(self) -> set[int]:
        return self.hellos.keys() - self._watch.deaths.keys()

    def send(self, verb: str, requests: Mapping[int, Any]) -> Events:
        """Ask engines for a verb, all at once; see ``send_each``."""
        return self.send_each({engine_id: (verb, r) for engine_id, r in requests.items()})

    def send_each(self, asked: Mapping[int, tuple[str, Any]]) -> Events:
        """Ask engines, all at once.

        Args:
            asked: verb and request by engine id.

        Returns:
            Where everything that they then say arrives.
        """
        events = self._conversation.begin()
        for engine_id, (verb, request) in asked.items():
            order = self._orders.get(engine_id)
            if order is not None:
                self._processes.engines[order].begin_cell()
            if order is None or (self._client.waits and not self.controller_death):
                road = ControllerRoad(self.client, self._processes.loop)
                road.send(engine_id, verb, request, events)
            else:
                message = Asked(number=self._conversation.number, verb=verb, request=request)
                self._channels.send(order, message)
        return events

    def _hear(self, order: int, message: Any) -> None:
        """Take what an engine says on its channel; runs in the thread that reads."""
        if isinstance(message, Ready):
            self._ready[order] = message
            self._orders.setdefault(message.engine_id, order)
            self._changed.set()
            return
        if isinstance(message, Unreadable):
            raise ValueError(message.reason)
        self._conversation.hear(self._ready[order].engine_id, message)

    def _note_loss(self, order: int, message: Any, error: Exception) -> None:
        """Note that something an engine said could not be taken; in the thread that reads."""
        ready = self._ready.get(order)
        engine_id = None if ready is None else ready.engine_id
        self._conversation.note_loss(engine_id, message, error, order=order)

    @property
    def lost(self) -> FsdpError | None:
        """What the last request lost of what engines said; None: nothing."""
        return self._conversation.lost

    def interrupt(self, engine_ids: list[int]) -> None:
        """Send SIGINT to engines."""
        for engine_id in engine_ids:
            if engine_id not in self._watch.deaths:
                self._launcher(engine_id).signal(signal.SIGINT)

    def _launcher(self, engine_id: int) -> Any:
        return self._processes.engines[self._orders[engine_id]]

    # -- watching

    def watch(self) -> None:
        """Say from now on when an engine ends, or the controller."""
        if not self._watch.known:
            self._watch.controller(self._processes.controller)
        for engine_id in self.hellos:
            self._watch.engine(engine_id, self._launcher(engine_id))

    @property
    def deaths(self) -> dict[int, Death]:
        """How those engines ended that have, by id; one that was replaced is no longer named."""
        return {i: death for i, death in self._watch.deaths.items() if i in self._orders}

    @property
    def controller_death(self) -> Death | None:
        """How the controller ended; None: it is there."""
        return self._watch.controller_death

    def _note_death(self, engine_id: int, code: int | None) -> None:
        self._conversation.note_death(engine_id, code)
        self._client.note_end(engine_id)
        self._changed.set()
