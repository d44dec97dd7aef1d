"""ENGINE: something that is done so seldom that it takes a small share of a thread's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.003


class TimeShare:
    """When something is due that may take ``SHARE`` of one thread's time.

    Args:
        least_seconds: from one time to the next, however cheap it is.
    """

    def __init__(self, *, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._due_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether it is due; if so, all that is spent from here on puts the next off."""
        if now < self._due_at:
            return False
        self._due_at = now + self._least_seconds
        return True

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the processor time of the inside, not what other threads took meanwhile."""
        before = time.thread_time()
        try:
            yield
        finally:
            self._due_at += (time.thread_time() - before) / SHARE
