"""KERNEL: the channels to the engines of this host, which our verbs take.

ipyparallel's own road leads over its controller, and each message passes five threads. A channel
leads straight to the engine's main thread, and brings back what the cell prints, in order, and
then its answer. ``engine/channel.py`` is the other side. One thread reads all channels.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fsdp_magic.core.channel import Asked, ChannelClosedError, Frames, framed

_CHUNK_BYTES = 1 << 20


class Channels:
    """Channels by the engines' local order.

    Args:
        heard: called with an engine's order and what it said, from the thread that reads.
    """

    def __init__(self, heard: Callable[[int, Any], None]) -> None:
        self._heard = heard
        self._sockets: dict[int, socket.socket] = {}
        self._woken, self._wake = os.pipe()
        self._thread: threading.Thread | None = None

    def start(self, sockets: dict[int, socket.socket]) -> None:
        """Take the channels, and read them from now on."""
        self._sockets = sockets
        self._thread = threading.Thread(target=self._read, name="fsdp_magic channels", daemon=True)
        self._thread.start()

    def send(self, order: int, message: Asked) -> None:
        """Send a request; if the engine is gone, its end is told elsewhere."""
        length, body = framed(message)
        with suppress(OSError):
            if len(body) < _CHUNK_BYTES:
                self._sockets[order].sendall(length + body)
            else:
                self._sockets[order].sendall(length)
                self._sockets[order].sendall(body)

    def close(self) -> None:
        """Close them; safe to call twice."""
        if self._wake < 0:
            return
        os.close(self._wake)
        self._wake = -1
        if self._thread is not None:
            self._thread.join(timeout=5)
        os.close(self._woken)
        for channel in self._sockets.values():
            channel.close()

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        open_ = {channel.fileno(): (order, Frames()) for order, channel in self._sockets.items()}
        for descriptor in open_:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    return
                order, frames = open_[descriptor]
                try:
                    for message in frames.add(self._sockets[order].recv(_CHUNK_BYTES)):
                        self._heard(order, message)
                except (OSError, ChannelClosedError):
                    poll.unregister(descriptor)
