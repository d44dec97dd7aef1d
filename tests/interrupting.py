"""Pressing stop as a person does: SIGINT to the notebook's kernel, which is the tests' process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_after(*seconds: float) -> Iterator[None]:
    """Press stop after some times; a press that comes when the call is over does nothing.

    Without times it is for a cell that presses by itself.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it would end the whole test run
        signal.signal(signal.SIGINT, lambda *_: None)
    timers = [threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)) for after in seconds]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        signal.signal(signal.SIGINT, handler)


def stop_pressed(when: str = "True", *gaps: float, then: str = "pass") -> str:
    """Return a line of a cell that presses stop on rank 0 at a moment that the cell knows.

    Args:
        when: an expression that is true then, on rank 0.
        gaps: seconds after which it presses again, one after the other.
        then: a statement that follows.
    """
    press = f"__import__('os').kill({os.getpid()}, 2)"
    again = "".join(f"; __import__('time').sleep({gap}); {press}" for gap in gaps)
    return f"if rank == 0 and {when}: {press}{again}; {then}\n"
