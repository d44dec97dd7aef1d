"""ENGINE: what SIGINT does, and when.

ipykernel swaps the handler around every message, and an interrupt that arrives between the end
of a cell and its reply loses the reply. So an engine has one handler for good: it raises in the
main thread while the person's code runs there, and is ignored at any other time. One that a cell
puts in its place stands until that cell is over.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class ReleasedByPeerError(BaseException):
    """Raised in a rank that is stopped because a peer failed.

    Not an ``Exception``, so that the person's ``except Exception`` does not swallow it.
    """


class Interrupts:
    """The SIGINT handler of an engine."""

    def __init__(self) -> None:
        self._open = False
        self._released = False

    def install(self) -> None:
        """Become the handler; must be called in the main thread."""
        signal.signal(signal.SIGINT, self._handle)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let SIGINT raise while the person's code runs in here."""
        self._keep()
        self._released = False
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self._keep()

    def close(self) -> None:
        """Ignore SIGINT from here on, whatever happened before."""
        while self._open:
            try:
                self._open = False
            except KeyboardInterrupt:  # the last one that got in
                continue

    @property
    def open(self) -> bool:
        """Whether the person's code is running."""
        return self._open

    def release(self) -> None:
        """Stop the person's code because a peer failed; called from another thread."""
        self._released = True
        main = threading.main_thread().ident
        if self._open and main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def _keep(self) -> None:
        """Become the handler again where a cell has put its own in place; in the main thread."""
        if signal.getsignal(signal.SIGINT) != self._handle:
            self.install()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._open:
            return
        if self._released:
            raise ReleasedByPeerError
        raise KeyboardInterrupt


INTERRUPTS = Interrupts()
"""The process has one handler, as it has one SIGINT."""
