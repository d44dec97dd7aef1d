"""Waiting for what engines say."""

from __future__ import annotations

import queue
import signal
import time
from types import FrameType

import pytest

from fsdp_magic.notebook.events import Events


def test_a_signal_as_the_wait_runs_out_does_not_make_it_wait_for_ever() -> None:
    seen = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1

    events, longest = Events(), 0.0
    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        while seen < 500:
            started = time.monotonic()
            with pytest.raises(queue.Empty):
                events.get(timeout=1e-3)
            longest = max(longest, time.monotonic() - started)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert longest < 10
