"""A fault that strikes while engines start: a process killed, or the start interrupted.

Afterwards there are engines in order, or none and an error that says so; the next start works.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cases import TOTAL_STEPS, Case
from checks import Outcome, compare, look_around, usable
from clean_engines import CLEAN
from left_over import listening, processes, until
from stage import Stage, Trained, build, prepare, started, train
from strike import RESTART_SECONDS, restart, strike

from fsdp_magic.errors import FsdpError
from fsdp_magic.notebook.session import Session

_START_SECONDS = {"starting": 2.5, "restarting": 1.2}
"""About as long as it takes; the fault comes at a part of it."""


def do(stage: Stage, case: Case) -> Outcome:
    """Do a case of any kind."""
    starts = case.place in ("starting", "restarting")
    return strike_a_start(stage, case) if starts else strike(stage, case)


def strike_a_start(stage: Stage, case: Case) -> Outcome:
    """Do a case whose fault strikes while engines start, and return what became of it."""
    outcome = Outcome(case)
    expected = stage.undisturbed(case)
    session = stage.ready(case.ranks)
    if case.place == "starting":
        stage.end_session()
        outcome.check(until(lambda: not processes()), f"left: {processes()}")
    ports = listening()
    struck = threading.Event()
    began = time.monotonic()
    error = None
    with _struck(case, struck):
        try:
            if stage.session is None:
                stage.session = started(case.ranks)
            else:
                session.restart()
        except (FsdpError, KeyboardInterrupt) as caught:
            error = caught.with_traceback(None)
    took = time.monotonic() - began
    outcome.ended = "in order" if error is None else type(error).__name__
    outcome.message = str(error or "")
    outcome.check(took < RESTART_SECONDS, f"the start took {took:.1f} s")
    _look_at_what_there_is(stage, case, error, outcome)
    session = _session(stage, case, outcome)
    outcome.check(usable(session), "not every rank can be used")
    outcome.seconds = time.monotonic() - began
    trained = Trained()
    build(session, case.program)
    trained.take(train(session, case, TOTAL_STEPS))
    compare(trained, expected, outcome)
    look_around(stage, ports, outcome)
    return outcome


def _look_at_what_there_is(
    stage: Stage, case: Case, error: BaseException | None, outcome: Outcome
) -> None:
    """A start that failed has left nothing; one that was in order has engines that answer."""
    if error is not None:
        gone = until(lambda: not processes())
        outcome.check(gone, f"a start that failed left {processes()}")
        return
    assert stage.session is not None
    try:
        outcome.check(usable(stage.session), "not every rank can be used")
    except FsdpError as death:  # killed just after they were ready
        fits = case.fault == "something killed while starting"
        outcome.check(fits, f"{type(death).__name__}: {death}")


def _session(stage: Stage, case: Case, outcome: Outcome) -> Session:
    """Return a session in order: by ``restart`` where there is one, else a new one."""
    session = stage.session
    if session is None:
        session = stage.session = started(case.ranks)
        prepare(session)
        session.run(CLEAN, show=False)
    else:
        restart(session, outcome)
    return session


@contextmanager
def _struck(case: Case, struck: threading.Event) -> Iterator[None]:
    """Strike after the case's part of the time that starting takes, unless that is over."""
    over = threading.Event()

    def wait() -> None:
        if over.wait(case.delay * _START_SECONDS[case.place]):
            return
        struck.set()
        if case.fault.startswith("interrupt"):
            os.kill(os.getpid(), signal.SIGINT)
            return
        victims = sorted(processes())
        if victims:
            with suppress(ProcessLookupError):
                os.kill(victims[case.item % len(victims)], signal.SIGKILL)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
