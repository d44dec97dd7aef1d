"""Where faults strike: sessions, the program that they train, and its losses without a fault."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import TOTAL_STEPS, Case, Program
from clean_engines import CLEAN, FRESH_NAMES
from left_over import Held, held, processes

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.session import Session

MEMORY_LIMIT = "512MiB"
ENGINE_SIDE = Path(__file__).with_name("engine_side.py").read_text()
TRAIN = "loss = loss_of(model, batch)"
LASTING_GROUPS = """
def _make(world):
    world.gradients_group(), world.hybrid_mesh(1)

_make(__import__("builtins")._fsdp_magic_call.__self__.world)
"""
"""What engines keep from the first model of a strategy on, so that what grows later is a leak."""


def started(ranks: int) -> Session:
    """Return a session of devices of limited size."""
    return Session(InitSpec(n=ranks, device="cpu", memory_limit=MEMORY_LIMIT))


@dataclass
class Trained:
    """Losses and gradient norms of runs, one after the other."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def take(self, run: Run) -> None:
        """Add the steps of a run."""
        self.losses += run.losses
        self.grad_norms += run.grad_norms


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
            prepare(session)
            self.usual_processes.setdefault(ranks, len(processes()))  # nothing starts any more
        elif not (session.running and session.alive):
            session.restart()
            prepare(session)
        session.runs.clear()
        session._history.leave_engines(lost=False)
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


def prepare(session: Session) -> None:
    """Bring the engines' side of the suite to fresh engines."""
    session.run(ENGINE_SIDE, show=False)
    session.run(LASTING_GROUPS, show=False)
    session.run(FRESH_NAMES, show=False)


def build(session: Session, program: Program) -> None:
    """Build the model and the data of a program."""
    size = 1 if program.strategy == "hybrid_shard" else None  # which divides any number of ranks
    session.model(_model_code(program), strategy=program.strategy, shard_size=size, show=False)


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
