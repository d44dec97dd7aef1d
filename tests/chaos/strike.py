"""One case done: the world prepared, the fault struck, and everything that must hold looked at.

``strike`` returns what happened; ``problems`` is empty if nothing was lost. What must hold after
every fault: the call ended in time with the right error, every rank can be used, the losses that
follow are exactly those of a run without a fault, and no process, port or file is left.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cases import TOTAL_STEPS, WORLD_FAULTS, Case
from checks import (
    CALL_SECONDS,
    FREE_BYTES,
    Outcome,
    allocated,
    compare,
    fits,
    look_around,
    since_the_fault,
    usable,
)
from clean_engines import CLEAN
from left_over import listening, processes, until
from pressing import pressed
from stage import TRAIN, Stage, Trained, build, prepare, train

from fsdp_magic.errors import FsdpError
from fsdp_magic.notebook.session import Session

TIMEOUT_SECONDS, TIMEOUT_WITH_WORKERS_SECONDS = 0.5, 1.5
RESTART_SECONDS = 30.0

CELLS = {
    "computing": """
for number in range(10):
    torch.ones(64, 64) @ torch.ones(64, 64)
    if number == 5: fault("computing")
dist.barrier()
""",
    "collective": """
for number in range(10):
    dist.all_reduce(torch.ones(4))
    if number == 5: fault("collective")
""",
    "printing": """
for number in range(300):
    print("line", number, "of rank", rank)
    if number == 200: fault("printing")
dist.barrier()
""",
}


def strike(stage: Stage, case: Case) -> Outcome:
    """Do a case whose fault strikes engines that run, and return what became of it."""
    outcome = Outcome(case)
    expected = stage.undisturbed(case)
    session = stage.ready(case.ranks)
    before, ports = set(processes()), listening()
    trained = Trained()
    if case.place != "model":
        build(session, case.program)
        if not case.in_training:
            trained.take(train(session, case, 2))
    held_before = allocated(session)
    _arm(session, stage, case)
    started = time.monotonic()
    error = _disturbed(stage, session, case, trained)
    took = time.monotonic() - started
    outcome.ended, outcome.message = _name(error), str(error or "")
    outcome.check(took < CALL_SECONDS, f"the call took {took:.1f} s")
    outcome.check(fits(case, error), f"it ended with {outcome.ended}: {outcome.message[:300]}")
    if case.fault in WORLD_FAULTS:
        restart(session, outcome)
        trained = Trained()
    _disarm(stage, case)
    outcome.check(usable(session), "not every rank can be used")
    outcome.seconds = since_the_fault(stage, case)
    struck = outcome.seconds is not None or case.may_come_early
    outcome.check(struck, "the fault never struck")
    more = max(after - before for after, before in zip(allocated(session), held_before))
    outcome.check(more < FREE_BYTES, f"{more} bytes more are held after it")
    if not trained.losses and (case.place == "model" or case.fault in WORLD_FAULTS):
        build(session, case.program)
    left = TOTAL_STEPS - len(trained.losses)
    if left:
        trained.take(train(session, case, left))
    compare(trained, expected, outcome)
    if case.fault not in WORLD_FAULTS:
        gone = until(lambda: set(processes()) <= before)
        outcome.check(gone, f"left: {[p for i, p in processes().items() if i not in before]}")
        stage.note_held()
    look_around(stage, ports, outcome)
    return outcome


def _arm(session: Session, stage: Stage, case: Case) -> None:
    in_micro_step = case.place in ("micro-step", "forward", "loss", "backward")
    in_step = in_micro_step or case.place in ("gradient norm", "after step")
    _disarm(stage, case)
    for rank in range(case.ranks):
        Path(stage.directory, f"struck-{rank}").unlink(missing_ok=True)
    values = {
        "place": case.place,
        "fault": case.fault,
        "how": case.how,
        "rank": case.rank,
        "step": case.step if in_step else None,
        "micro_step": case.micro_step if in_micro_step else None,
        "item": case.item,
        "directory": stage.directory,
        "kernel": os.getpid(),
        "helper": _helper(session, case),
    }
    session.run(f"arm(**{values!r})", show=False)


def _disarm(stage: Stage, case: Case) -> None:
    """See that a fault that has not struck does not strike later."""
    for rank in range(case.ranks):
        Path(stage.directory, f"armed-{rank}").unlink(missing_ok=True)


def _helper(session: Session, case: Case) -> int | None:
    """Return the process id of the helper that the case kills."""
    if case.fault == "fork server killed":
        server = session._server
        return None if server is None else server.pid
    if case.fault == "controller killed":
        return int(next(i for i, p in processes().items() if p.startswith("fsdp controller")))
    return None


def _disturbed(
    stage: Stage, session: Session, case: Case, trained: Trained
) -> BaseException | None:
    """Make the call in which the fault strikes, and return how it failed."""
    calls: dict[str, Callable[[], Any]] = {
        "model": lambda: build(session, case.program),
        "eval": lambda: session.eval(
            TRAIN, data="held", micro_batch_size=2, timeout=_timeout(case), show=False
        ),
        "pull": lambda: session.pull("fault('pull') or rank", rank="all"),
        "idle": lambda: _idle(session, case),
    }
    calls |= {
        place: partial(session.run, code, timeout=_timeout(case), show=False)
        for place, code in CELLS.items()
    }
    call = calls.get(case.place, lambda: train(session, case, TOTAL_STEPS, timeout=_timeout(case)))
    runs = len(session.runs)
    try:
        with pressed(stage, case):
            call()
    except (FsdpError, KeyboardInterrupt) as error:
        return error.with_traceback(None)
    finally:
        for run in session.runs[runs:]:
            trained.take(run)
    return None


def _timeout(case: Case) -> float | None:
    if case.fault != "stuck, timed out":
        return None
    return TIMEOUT_SECONDS if case.program.workers is None else TIMEOUT_WITH_WORKERS_SECONDS


def _idle(session: Session, case: Case) -> None:
    """Strike from outside, while nothing is asked; then ask for something."""
    pid = _helper(session, case) or session.status(show=False)[case.rank or 0].pid
    number = {"engine interrupted": signal.SIGINT, "paused": signal.SIGSTOP}
    os.kill(pid, number.get(case.fault, signal.SIGKILL))
    waker = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
    if case.fault == "paused":
        waker.start()
    time.sleep(0.2)
    session.run("pass", show=False)
    if case.fault == "paused":
        waker.join()


def _name(error: BaseException | None) -> str:
    return "in order" if error is None else type(error).__name__


def restart(session: Session, outcome: Outcome) -> None:
    """Get fresh engines, in time."""
    started = time.monotonic()
    session.restart()
    took = time.monotonic() - started
    outcome.restart_seconds = took
    outcome.check(took < RESTART_SECONDS, f"the restart took {took:.1f} s")
    prepare(session)
    session.run(CLEAN, show=False)
