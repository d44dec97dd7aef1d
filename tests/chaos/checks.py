"""What must hold after a fault, and what became of a case."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from cases import Case
from left_over import listening, processes, until
from stage import Stage, Trained

from fsdp_magic.errors import CellFailedError, EngineDiedError, FsdpError, OutOfMemoryOnRankError
from fsdp_magic.notebook.session import Session

CALL_SECONDS = 10.0
"""A call that takes longer hangs; faults of ours last less than a second."""
FREE_BYTES = 4 << 20
"""What may be held after a fault beyond what was before it: far less than the fault takes."""
USABLE = """
import torch
import torch.distributed as dist

x = torch.full((1,), rank + 1.0)
dist.all_reduce(x)
x.item()
"""


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


def fits(case: Case, error: BaseException | None) -> bool:
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


def usable(session: Session) -> bool:
    """Return whether every rank takes part in a collective."""
    total = sum(range(1, session.world_size + 1))
    outputs = session.run(USABLE, timeout=CALL_SECONDS, show=False)
    return [output.result for output in outputs] == [f"{total}.0"] * session.world_size


def allocated(session: Session) -> list[int]:
    """Return the bytes that tensors take on each rank."""
    return [status.allocated_bytes or 0 for status in session.status(show=False)]


def since_the_fault(stage: Stage, case: Case) -> float | None:
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
    server = None if stage.session is None else stage.session._server
    if server is not None and not server.alive and outcome.case.fault != "fork server killed":
        outcome.check(False, f"the fork server ended: {server._process.returncode} {server.log}")
    outcome.check(listening() <= ports, f"this process listens at {listening() - ports}")
