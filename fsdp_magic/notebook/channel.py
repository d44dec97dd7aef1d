"""KERNEL: the channels to the engines of this host, which our verbs take.

ipyparallel's own road leads over its controller, and each message passes five threads. A channel
leads straight to the engine's main thread, and brings back what the cell prints, in order, and
then its answer. ``engine/channel.py`` is the other side. One thread reads all channels. It also
sends what a channel does not take at once: an engine that stands still must hold nobody up.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fsdp_magic.core.channel import Asked, ChannelClosedError, Frames, framed

_CHUNK_BYTES = 1 << 20
_TAKE_SECONDS = 5.0
_LOG = logging.getLogger(__name__)


class _Line:
    """One engine's channel, and what waits to be sent on it.

    Args:
        channel: the kernel's side.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.frames = Frames()
        self.taken = threading.Event()
        self._unsent: deque[memoryview] = deque()
        self._sending = threading.Lock()

    def send(self, *parts: bytes) -> bool:
        """Send as much as the channel takes now; return whether that was all."""
        with self._sending:
            self._unsent.extend(memoryview(part) for part in parts)
            try:
                while self._unsent:
                    sent = self.channel.send(self._unsent[0][:_CHUNK_BYTES], socket.MSG_DONTWAIT)
                    rest = self._unsent.popleft()[sent:]
                    if rest:
                        self._unsent.appendleft(rest)
            except BlockingIOError:
                return False
            except OSError:  # the engine is gone; its end is told elsewhere
                self._unsent.clear()
            return True


class Channels:
    """Channels by the engines' local order.

    Args:
        heard: called with an engine's order and what it said, from the thread that reads.
        failed: called so with an engine's order, what it said, and what ``heard`` raised.
    """

    def __init__(
        self, heard: Callable[[int, Any], None], failed: Callable[[int, Any, Exception], None]
    ) -> None:
        self._heard = heard
        self._failed = failed
        self._lines: dict[int, _Line] = {}
        self._coming: queue.SimpleQueue[tuple[int, _Line]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._thread: threading.Thread | None = None

    def start(self, sockets: dict[int, socket.socket]) -> None:
        """Take the channels, and read them from now on."""
        self._lines = {order: _Line(channel) for order, channel in sockets.items()}
        self._thread = threading.Thread(target=self._serve, name="fsdp_magic channels", daemon=True)
        self._thread.start()

    def replace(self, order: int, channel: socket.socket) -> None:
        """Read the channel of the engine that took the place of one that ended.

        Safe to call twice with the same channel.
        """
        if self._lines[order].channel is channel:
            return
        line = _Line(channel)
        self._coming.put((order, line))
        os.write(self._wake, b".")
        line.taken.wait(timeout=_TAKE_SECONDS)

    def send(self, order: int, message: Asked) -> None:
        """Send a request, without waiting; if the engine is gone, its end is told elsewhere."""
        if not self._lines[order].send(*framed(message)):
            os.write(self._wake, b".")

    def close(self) -> None:
        """Close them; safe to call twice."""
        if self._wake < 0:
            return
        os.close(self._wake)
        self._wake = -1
        if self._thread is not None:
            self._thread.join(timeout=5)
        os.close(self._woken)
        for line in self._lines.values():
            line.channel.close()

    # -- the thread that reads

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        open_ = {line.channel.fileno(): order for order, line in self._lines.items()}
        for descriptor in open_:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, state in poll.poll():
                if descriptor in open_:
                    self._turn(poll, descriptor, state, open_[descriptor])
                elif descriptor != self._woken:
                    continue  # of an engine that was replaced a moment ago
                elif os.read(self._woken, 64):
                    self._take_replacements(poll, open_)
                    for sending in open_:
                        with suppress(FileNotFoundError):  # it is gone
                            poll.modify(sending, select.POLLIN | select.POLLOUT)
                else:
                    return

    def _take_replacements(self, poll: select.poll, open_: dict[int, int]) -> None:
        """Read fresh engines' channels from now on, in the place of those of ended ones."""
        while not self._coming.empty():
            order, line = self._coming.get()
            old, self._lines[order] = self._lines[order].channel, line
            open_.pop(old.fileno(), None)
            with suppress(KeyError):  # its end was noticed already
                poll.unregister(old)
            old.close()
            open_[line.channel.fileno()] = order
            poll.register(line.channel, select.POLLIN)
            line.taken.set()

    def _turn(self, poll: select.poll, descriptor: int, state: int, order: int) -> None:
        """Send what a channel takes, and read what it brings."""
        line = self._lines[order]
        if state & select.POLLOUT and line.send():
            poll.modify(descriptor, select.POLLIN)
        if not state & ~select.POLLOUT:
            return
        try:
            for message in line.frames.add(line.channel.recv(_CHUNK_BYTES)):
                self._hear(order, message)
        except (OSError, ChannelClosedError):
            poll.unregister(descriptor)

    def _hear(self, order: int, message: Any) -> None:
        """Pass a message on; whatever comes of it, the next one must be read."""
        try:
            self._heard(order, message)
        except Exception as error:  # what an engine says may be anything
            _LOG.debug("a message of engine %d was lost", order, exc_info=True)
            self._failed(order, message, error)
