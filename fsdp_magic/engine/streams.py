"""ENGINE: standard output and error: what else writes to them than the cell itself.

C code and subprocesses write to descriptors, forked children have no publishing thread, and a
thread may go on when its cell is over.
"""

from __future__ import annotations

import codecs
import concurrent.futures.thread
import fcntl
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ipykernel.iostream import OutStream

_DRAIN_SECONDS = 1.0
_PIPE_BYTES = 2**20
_UNPUBLISHED = 2_000_000
"""Characters that may wait to be published."""

Streams = Sequence[Any]
"""Standard output and standard error, as ``WatchedStream``."""


class WatchedStream(OutStream):
    """A stream that also takes what C code and subprocesses write to its file descriptor.

    ipykernel's does too, but not where a test of pytest has started it. And this one makes who
    prints faster than can be published wait, where ipykernel's holds everything in memory.
    """

    def __init__(self, session: Any, pub_thread: Any, name: str) -> None:
        self.reading = threading.Lock()
        super().__init__(session, pub_thread, name, watchfd="force")  # type: ignore[no-untyped-call]
        self._unpublished = 0
        # C code that prints with the interpreter lock held would wait for the reader, and the
        # reader for the lock: it may print this much
        assert self._fid is not None
        fcntl.fcntl(self._fid, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def close(self) -> None:
        """Do nothing: a cell that closes its standard output must not close that of the next."""

    def _watch_pipe_fd(self) -> None:
        """Read what is written to the descriptor; a thread of its own runs this.

        Standard error goes to the engine's log too, where a library's last words are looked for.
        ipykernel's way also copies the other one, at any length.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        assert self._fid is not None
        poll = select.poll()
        poll.register(self._fid, select.POLLIN)
        while poll.poll():
            with self.reading:
                received = os.read(self._fid, 65536)
                if not received:
                    return
                if self.name == "stderr":  # first: it may be the last word of a process
                    os.write(self._original_stdstream_copy, received)
                self.write(decoder.decode(received))

    def write(self, string: str) -> int:
        """Take text to be published."""
        super().write(string)
        self._unpublished += len(string)
        if self._unpublished > _UNPUBLISHED:
            self._unpublished = 0
            self.flush()  # type: ignore[no-untyped-call]
        return len(string)


def follow_threads(streams: Streams) -> None:
    """Let what a thread prints belong to the cell that started it, also once that is over.

    A pool's threads serve later cells too: theirs belongs to the cell that runs.
    """
    start = threading.Thread.start

    def start_in_cell(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) is not concurrent.futures.thread._worker:
            parent = dict(streams[0].parent_header)
            thread.run = partial(_run_in_cell, streams, parent, thread.run)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_cell  # type: ignore[assignment, method-assign]


def _run_in_cell(streams: Streams, parent: dict[str, Any], run: Callable[[], None]) -> None:
    for stream in streams:
        # ipykernel 7 has ``set_thread_parent``, which does this; 6 has the variable only
        stream._parent_header.set(parent)
    run()


def print_to_parent(streams: Streams) -> None:
    """Let a forked child (a DataLoader's worker) print into its parent's descriptors.

    The parent reads them; the publishing thread has no counterpart in a child.
    """
    for descriptor, stream in enumerate(streams, start=1):
        file = open(  # noqa: SIM115  # as long as the child lives
            descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False
        )
        stream.write, stream.flush = file.write, file.flush


def drain(streams: Streams) -> None:
    """Wait until all that stands in file descriptors 1 and 2 has been taken by their streams."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    for stream in streams:
        while _waiting_bytes(stream._fid) and time.monotonic() < deadline:
            time.sleep(0.002)
        # what was read is taken while this is held
        if stream.reading.acquire(timeout=_DRAIN_SECONDS):
            stream.reading.release()


def _waiting_bytes(descriptor: int) -> int:
    """Return how many bytes stand in a pipe."""
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)
