"""ENGINE: the connections that a process group opened, and how to break them.

None of gloo's own calls ends a collective that waits for a peer; shutting down its established
sockets does, on both sides, within milliseconds. Its listening socket must be left alone: gloo
ends the process when that one fails.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded_sockets() -> Iterator[dict[int, str]]:
    """Collect the sockets that are opened inside, as descriptor -> kernel's name of it."""
    opened: dict[int, str] = {}
    before = _sockets()
    yield opened
    opened.update(
        (descriptor, link)
        for descriptor, link in _sockets().items()
        if before.get(descriptor) != link
    )


def _sockets() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found[int(entry)] = link
    return found


def shut_down(descriptor: int, link: str) -> None:
    """Shut an established connection down, if the descriptor still is that socket."""
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != link:
            return
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # already closed, which is what was wanted
        return
