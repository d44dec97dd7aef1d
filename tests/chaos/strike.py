"""One case done: the world prepared, the fault struck, and everything that must hold looked at.

``strike`` returns what happened; ``problems`` is empty if nothing was lost. What must hold after
every fault: the call ended in time with the right error, every rank can be used, the losses that
follow are exactly those of a run without a fault, and no process, port or file is left.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cases import TOTAL_STEPS, WORLD_FAULTS, Case, Program
from clean_engines import CLEAN, FRESH_NAMES
from world import Held, held, listening, processes, until

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.errors import CellFailedError, EngineDiedError, FsdpError, OutOfMemoryOnRankError
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.session import Session

CALL_SECONDS = 10.0
"""A call that takes longer hangs; faults of ours last less than a second."""
TIMEOUT_SECONDS, TIMEOUT_WITH_WORKERS_SECONDS = 0.5, 1.5
PRESS_SECONDS = 0.15
CALL_LASTS_SECONDS, RECOVERY_LASTS_SECONDS = 0.15, 0.04
"""About as long as a call, and what follows a failure, take; interrupts come at a part of it."""
MEMORY_LIMIT = "512MiB"
FREE_BYTES = 4 << 20
"""What may be held after a fault beyond what was before it: far less than the fault takes."""
RESTART_SECONDS = 30.0

ENGINE_SIDE = Path(__file__).with_name("engine_side.py").read_text()
TRAIN = "loss = loss_of(model, batch)"
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
USABLE = "x = torch.full((1,), rank + 1.0); dist.all_reduce(x); x.item()"


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        case: what was done.
        ended: the name of the error that the call ended with; ``in order``: none.
        message: its text.
        seconds: from the fault until the next cell has run on every rank; None: it never struck.
        restart_seconds: what fresh engines took; None: none were needed.
        problems: what was not as it must be.
    """

    case: Case
    ended: str = ""
    message: str = ""
    seconds: float | None = None
    restart_seconds: float | None = None
    problems: list[str] = field(default_factory=list)

    def check(self, holds: bool, problem: str) -> None:
        """Note a problem if something does not hold."""
        if not holds:
            self.problems.append(problem)

    @property
    def ending(self) -> str:
        """How it ended, and what was lost."""
        took = "" if self.seconds is None else f" {self.seconds:.2f} s"
        lines = [f"-> {self.ended}{took}", *(f"    LOST: {p}" for p in self.problems)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.case} {self.ending}"


class Stage:
    """The sessions that cases are done in, and the losses of runs without a fault."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="chaos-")
        self.directory = self._directory.name
        self.session: Session | None = None
        self.usual_processes: dict[int, int] = {}
        self.held: list[dict[int, Held]] = []
        self._undisturbed: dict[tuple[int, Program], Trained] = {}

    def ready(self, ranks: int) -> Session:
        """Return a session whose engines are as if they had just started."""
        if self.session is not None and self.session.world_size != ranks:
            self.end_session()
        session = self.session
        if session is None:
            session = self.session = Session(
                InitSpec(n=ranks, device="cpu", memory_limit=MEMORY_LIMIT)
            )
            self.usual_processes.setdefault(ranks, len(processes()))
            prepare(session)
        elif not (session.running and session.alive):
            session.restart()
            prepare(session)
        session.runs.clear()
        session._history.leave_engines()
        session.run(CLEAN, show=False)
        return session

    def undisturbed(self, case: Case) -> Trained:
        """Return what the program of a case gives without a fault."""
        key = (case.ranks, case.program)
        if key not in self._undisturbed:
            session = self.ready(case.ranks)
            build(session, case.program)
            trained = Trained()
            trained.take(train(session, case, TOTAL_STEPS))
            self._undisturbed[key] = trained
        return self._undisturbed[key]

    @property
    def running(self) -> bool:
        """Whether there are engines; the guards around tests ask."""
        return self.session is not None and self.session.running

    @property
    def engines(self) -> Engines:
        """The engines."""
        assert self.session is not None
        return self.session.engines

    def note_held(self) -> None:
        """Note what the kernel and the engines hold open, after a case."""
        assert self.session is not None
        pids = [os.getpid(), *(status.pid for status in self.session.status(show=False))]
        self.held.append({pid: held(pid) for pid in pids})

    def end_session(self) -> None:
        """End the engines."""
        if self.session is not None:
            self.session.shutdown()
            self.session = None

    def close(self) -> None:
        """End the engines and remove the files."""
        self.end_session()
        self._directory.cleanup()


@dataclass
class Trained:
    """Losses and gradient norms of runs, one after the other."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def take(self, run: Run) -> None:
        """Add the steps of a run."""
        self.losses += run.losses
        self.grad_norms += run.grad_norms


# ---------------------------------------------------------------- the program


def prepare(session: Session) -> None:
    """Bring the engines' side of the suite to fresh engines."""
    session.run(ENGINE_SIDE, show=False)
    session.run(FRESH_NAMES, show=False)


def build(session: Session, program: Program) -> None:
    """Build the model and the data of a program."""
    session.model(_model_code(program), strategy=program.strategy, show=False)


def _model_code(program: Program) -> str:
    data = "Samples(SAMPLES)"
    if program.workers is not None:
        data = (
            f"torch.utils.data.DataLoader({data}, batch_size=2, num_workers={program.workers}, "
            "shuffle=True)"
        )
    return f"""
torch.manual_seed(1)
model = Net({program.layer!r}).double()
fault("model")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
data, held = {data}, Samples(7)
"""


def train(
    session: Session,
    case: Case,
    steps: int,
    *,
    program: Program | None = None,
    timeout: float | None = None,
) -> Run:
    """Train some steps, as the case's program says, or another."""
    program = program or case.program
    options: dict[str, Any] = {}
    if program.workers is None:
        options["micro_batch_size"] = 2
    if case.place == "evaluation":
        options |= {"eval_every": 2, "eval_data": "held"}
    return session.train(
        TRAIN,
        data="data",
        steps=steps,
        accumulate=program.accumulate,
        max_grad_norm=program.max_grad_norm,
        after_step="after",
        timeout=timeout,
        show=False,
        **options,
    )


# ---------------------------------------------------------------- the strike


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
    held_before = _allocated(session)
    _arm(session, stage, case)
    started = time.monotonic()
    error = _disturbed(stage, session, case, trained)
    took = time.monotonic() - started
    outcome.ended, outcome.message = _name(error), str(error or "")
    outcome.check(took < CALL_SECONDS, f"the call took {took:.1f} s")
    outcome.check(_fits(case, error), f"it ended with {outcome.ended}: {outcome.message[:300]}")
    if case.fault in WORLD_FAULTS:
        restart(session, outcome)
        trained = Trained()
    _disarm(stage, case)
    outcome.check(usable(session), "not every rank can be used")
    outcome.seconds = _since_the_fault(stage, case)
    struck = outcome.seconds is not None or case.may_come_early
    outcome.check(struck, "the fault never struck")
    more = max(after - before for after, before in zip(_allocated(session), held_before))
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


def _allocated(session: Session) -> list[int]:
    """Return the bytes that tensors take on each rank."""
    return [status.allocated_bytes or 0 for status in session.status(show=False)]


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
        with _pressed(stage, case):
            call()
    except (FsdpError, KeyboardInterrupt) as error:
        return error.with_traceback(None)
    finally:
        for run in session.runs[runs:]:
            trained.take(run)
    return None


@contextmanager
def _pressed(stage: Stage, case: Case) -> Iterator[None]:
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
    session.status(show=False)
    if case.fault == "paused":
        waker.join()


def _fits(case: Case, error: BaseException | None) -> bool:
    """Return whether a fault ended as it should."""
    match case.fault:
        case "exception":
            return type(error) is CellFailedError and _came_from(error, case)
        case "out of memory":
            return type(error) is OutOfMemoryOnRankError and _came_from(error, case)
        case "interrupt" | "stuck, interrupted twice":
            return isinstance(error, KeyboardInterrupt)
        case "interrupt at any moment":
            return error is None or isinstance(error, KeyboardInterrupt)
        case "exception, then interrupt":
            return isinstance(error, (KeyboardInterrupt, CellFailedError))
        case "stuck, timed out":
            return isinstance(error, FsdpError) and "--timeout" in str(error)
        case "worker killed":
            return type(error) is CellFailedError
        case "engine interrupted":
            return error is None or type(error) is CellFailedError
        case "paused":
            return error is None
        case "engine killed":
            named = isinstance(error, EngineDiedError) and error.signal == signal.SIGKILL
            return named and error.rank == case.rank  # type: ignore[union-attr]
        case "controller killed":
            return error is None or isinstance(error, FsdpError)
        case _:
            return error is None


def _came_from(error: CellFailedError, case: Case) -> bool:
    """Return whether the ranks that were struck are named, and no other."""
    ranks = range(case.ranks) if case.rank is None else (case.rank,)
    return set(error.ranks) <= set(ranks)


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


def usable(session: Session) -> bool:
    """Return whether every rank takes part in a collective."""
    total = sum(range(1, session.world_size + 1))
    outputs = session.run(USABLE, timeout=CALL_SECONDS, show=False)
    return [output.result for output in outputs] == [f"{total}.0"] * session.world_size


def _since_the_fault(stage: Stage, case: Case) -> float | None:
    """Return the seconds since the fault struck first, on the clock that all processes share."""
    moments = [
        float(path.read_text())
        for rank in range(case.ranks)
        if (path := Path(stage.directory, f"struck-{rank}")).exists()
    ]
    return time.monotonic() - min(moments) if moments else None


def compare(trained: Trained, expected: Trained, outcome: Outcome) -> None:
    """Check that every loss and norm is exactly that of the run without a fault."""
    for name in ("losses", "grad_norms"):
        ours, right = getattr(trained, name), getattr(expected, name)
        outcome.check(ours == right, f"wrong {name}: {ours} instead of {right}")


def look_around(stage: Stage, ports: set[tuple[str, int]], outcome: Outcome) -> None:
    """Check that there are no more processes, ports and directories than a session has."""
    usual = stage.usual_processes[outcome.case.ranks]
    done = until(lambda: len(processes()) <= usual)
    outcome.check(done, f"{usual} processes are usual, not {processes()}")
    outcome.check(listening() <= ports, f"this process listens at {listening() - ports}")
