"""ENGINE: updates of displays, thinned: a loop may make thousands a second, a page shows four.

The newest waits until a quarter of a second has passed since the one before. What is published
cannot be slowed down by its reader: all of them would pile up, and an interrupt would wait.
"""

from __future__ import annotations

import time
from typing import Any

_SECONDS = 0.25


class DisplayUpdates:
    """The updates that wait, by the name of the display.

    They are put here by the thread that displays, and sent by the publishing thread alone, so that
    an older one never overtakes.

    Args:
        publisher: ipykernel's, which displays go through.
        thread: the publishing thread.
    """

    def __init__(self, publisher: Any, thread: Any) -> None:
        self._publisher = publisher
        self._thread = thread
        self._waiting: dict[str, dict[str, Any]] = {}
        self._sent_at: dict[str, float] = {}
        self._timed = False

    def take(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return an update that may be sent now; None: it waits."""
        name = message["content"].get("transient", {}).get("display_id", "")
        now = time.monotonic()
        if name not in self._waiting and now - self._sent_at.get(name, -_SECONDS) >= _SECONDS:
            self._sent_at[name] = now
            return message
        self._waiting[name] = message  # before the look at the timer, which looks in here last
        if not self._timed:
            self._timed = True
            loop = self._thread.io_loop
            self._thread.schedule(lambda: loop.call_later(_SECONDS, self.send))
        return None

    @property
    def any_wait(self) -> bool:
        """Whether one has not been sent."""
        return bool(self._waiting)

    def send(self) -> None:
        """Send what waits; in the publishing thread."""
        self._timed = False
        for name in list(self._waiting):
            message = self._waiting.pop(name)
            self._sent_at[name] = time.monotonic()
            publisher = self._publisher
            publisher.session.send(publisher.pub_socket, message, ident=publisher.topic)

    def finish(self) -> None:
        """Send what waits at the end of a cell; in the publishing thread."""
        self.send()
        self._sent_at.clear()
