"""ENGINE: the connections that a process group opened, and how to break them.

None of gloo's own calls ends a collective that waits for a peer; shutting down its established
sockets does, on both sides, within milliseconds. Its listening socket must be left alone: gloo
ends the process when that one fails.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_INT = struct.Struct("i")


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


def is_quiet(sockets: Mapping[int, str]) -> bool:
    """Return whether nothing is on its way through any of these connections, in or out."""
    return not any(_under_way(descriptor, link) for descriptor, link in sockets.items())


def shut_down(sockets: Mapping[int, str]) -> None:
    """Shut established connections down.

    Args:
        sockets: descriptor -> kernel's name of it; one that is another by now is left alone.
    """
    for descriptor, link in sockets.items():
        with suppress(OSError), _connection(descriptor, link) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _under_way(descriptor: int, link: str) -> int:
    """Return how many bytes wait to be read here, or by the peer; 0 of one that is closed."""
    waiting = 0
    with suppress(OSError), _connection(descriptor, link) as connection:
        for question in (termios.FIONREAD, termios.TIOCOUTQ):
            answer = fcntl.ioctl(connection, question, bytes(_INT.size))
            waiting += _INT.unpack(answer)[0]
    return waiting


@contextmanager
def _connection(descriptor: int, link: str) -> Iterator[socket.socket]:
    """Give a duplicate of an established connection.

    Raises:
        OSError: if the descriptor is closed, another file's by now, or that of a listening socket.
    """
    if os.readlink(f"/proc/self/fd/{descriptor}") != link:
        raise OSError(f"descriptor {descriptor} is no longer {link}")
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(f"descriptor {descriptor} listens")
        yield connection
