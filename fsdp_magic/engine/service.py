"""ENGINE: the one service thread of a rank.

While a cell runs it looks every few milliseconds whether a peer gave the transports up, and if
so breaks this rank's own, then stops the person's code if that did not. When the kernel asks it
says where the main thread is. During a training run it also takes samples and publishes them. It
exists before a memory limit is set: at the limit no
thread can start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from ipyparallel.datapub import publish_data

from fsdp_magic.core.whereabouts import WHERE_KEY, WhereReport
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.whereabouts import LOCATOR
from fsdp_magic.engine.world import World

_WATCH_SECONDS = 0.02
_GRACE_SECONDS = 0.2
"""How long code may go on after its transports broke, before it is stopped: an error that a
collective raises says more than an interrupt."""

Tick = Callable[[float], None]


class Service:
    """The service thread.

    Args:
        world: what to watch.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._busy = threading.Event()
        self._over = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._tick: Tick | None = None
        self._answered = 0
        self._thread = threading.Thread(target=self._serve, name="fsdp_magic", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, tick: Tick | None = None) -> Iterator[None]:
        """Watch over a cell, and call ``tick`` with the time some fifty times a second."""
        self._tick = tick
        page, rank = self._world.page, self._world.rank
        self._answered = page.question
        page.note_busy(rank)
        self._idle.clear()
        self._over.clear()
        self._busy.set()
        try:
            yield
        finally:
            self._over.set()
            self._idle.wait()
            self._tick = None
            page.note_idle(rank)

    def _serve(self) -> None:
        if self._world.device.type == "cuda":
            # the current device belongs to a thread: unset, this one would open GPU 0
            torch.cuda.set_device(self._world.device)
        while True:
            self._busy.wait()
            self._busy.clear()  # here, not where the cell ends: it may end before we get here
            self._watch()
            self._idle.set()

    def _watch(self) -> None:
        released_at: float | None = None
        while not self._over.wait(_WATCH_SECONDS):
            now = time.monotonic()
            if self._world.released:
                if released_at is None:
                    released_at = now
                    self._world.groups.disconnect()
                elif now - released_at > _GRACE_SECONDS:
                    INTERRUPTS.release()
                continue
            with suppress(MemoryError):  # at the limit; the next tick finds room again
                self._answer()
                if self._tick is not None:
                    self._tick(now)

    def _answer(self) -> None:
        """Say where the main thread is if the kernel has asked since the last answer."""
        question = self._world.page.question
        if question == self._answered:
            return
        self._answered = question
        with suppress(Exception):  # whatever fails here, this thread must go on watching
            where = LOCATOR.of_main_thread()
            report = WhereReport(rank=self._world.rank, number=question, where=where)
            publish_data({WHERE_KEY: report})
