"""A person who presses stop, at the moment that a case says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cases import Case
from stage import Stage

PRESS_SECONDS = 0.15
CALL_LASTS_SECONDS, RECOVERY_LASTS_SECONDS = 0.15, 0.04
"""About as long as a call, and what follows a failure, take; interrupts come at a part of it."""


@contextmanager
def pressed(stage: Stage, case: Case) -> Iterator[None]:
    """Interrupt this process inside, when the fault wants that."""
    presses = {
        "stuck, interrupted twice": _press_until_over,
        "interrupt at any moment": _press_at_any_moment,
        "exception, then interrupt": _press_after,
    }
    if case.fault not in presses:
        yield
        return
    over = threading.Event()
    # a press that comes when nothing is asked for belongs to nobody
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    presser = threading.Thread(target=presses[case.fault], args=(stage, case, over))
    presser.start()
    try:
        yield
    finally:
        over.set()
        presser.join()
        signal.signal(signal.SIGINT, before)


def _press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _wait_until_struck(stage: Stage, over: threading.Event) -> None:
    while not any(Path(stage.directory).glob("struck-*")) and not over.wait(0.001):
        continue


def _press_until_over(stage: Stage, case: Case, over: threading.Event) -> None:
    _wait_until_struck(stage, over)
    while not over.wait(PRESS_SECONDS):
        _press()


def _press_at_any_moment(stage: Stage, case: Case, over: threading.Event) -> None:
    seconds = (case.delay * CALL_LASTS_SECONDS, 0.03)
    for wait in seconds[: 2 if case.how == "twice" else 1]:
        if not over.wait(wait):
            _press()


def _press_after(stage: Stage, case: Case, over: threading.Event) -> None:
    """Press while the ranks that the exception has released are brought back into order."""
    _wait_until_struck(stage, over)
    if not over.wait(case.delay * RECOVERY_LASTS_SECONDS):
        _press()
