"""What a training step costs under ``%%fsdp_train``, live panel included, against torchrun.

Two identical torchrun jobs of ``torchrun_step.py`` (A and its double) and a real Jupyter kernel
with two engines (B) stay alive side by side, and take the same number of steps of the same
model in turn, in rotating order. B is the magic itself: the kernel renders the panel twice a
second and publishes it, and this script receives it as a browser would.

Wall time is taken here, from the request until everything has answered, so B includes sending
the cell, compiling it, preparing the run and its last frame. Processor time is that of the
ranks' processes; the kernel's and its helpers' are given as shares of one core. Losses and
gradient norms of both sides must agree, or the work was not the same.

    python benchmarks/step_overhead.py [--rounds 15] [--steps 60]
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from side_by_side import (
    HERE,
    RANKS,
    Kernel,
    TorchrunJob,
    comparison,
    cpu_seconds,
    machine,
    measured_from_command,
    rotated,
    say,
    tree_cpu_seconds,
)

BOUND = 1.05
_AGREEMENT = 1e-3
"""Relative; both sides compute in float32 and add up in another order."""

STRATEGY = "full_shard"
SETUP = """
%load_ext fsdp_magic
session = __import__("fsdp_magic").init(n={ranks}, device="cpu", show=False)
session.run('''
import sys
sys.path.insert(0, {here!r})
import torch
from torchrun_step import LEARNING_RATE, build_data, build_model
data = build_data()
''', show=False)
session.model('''
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
''', show=False, **{options})
import json
print(json.dumps([rank.pid for rank in session.status(show=False)]))
"""
CELL = """
%%fsdp_train --data data --no-shuffle --micro-batch-size 8 --steps {steps} -o run
loss = model(input_ids=batch, labels=batch).loss
"""
VOTES = """
print(session.run('''
import builtins, statistics, time
vote = builtins._fsdp_magic_call.__self__.world.vote
blocks = []
for block in range(20):
    began = time.perf_counter()
    for _ in range(500):
        vote.take()
    blocks.append((time.perf_counter() - began) / 500)
statistics.median(blocks)
''', show=False)[0].result)
"""
"""Ranks that vote again and again, and do nothing else: a vote without the wait for the slowest."""
VOTE_NUMBER = """
print(session.run("import builtins; builtins._fsdp_magic_call.__self__.world.vote._number",
                  show=False)[0].result)
"""
NUMBERS = """
print(json.dumps({"losses": run.losses, "norms": run.grad_norms, "seconds": run.seconds}))
"""


@dataclass(kw_only=True)
class Series:
    """What one side took, round by round; milliseconds per step.

    Attributes:
        wall: seen from outside.
        loop: inside the ranks, without sending and preparing.
        cpu: of all ranks together.
    """

    wall: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """Return the median of what was measured, by its name."""
        measured = dataclasses.asdict(self)
        return {kind: round(statistics.median(v), 3) for kind, v in measured.items() if v}


class TorchrunSide:
    """Steps under torchrun."""

    def __init__(self, job: TorchrunJob) -> None:
        self._job = job
        self._pids = [hello["pid"] for hello in job.hellos]
        self.series = Series()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def take(self, steps: int) -> None:
        """Take steps."""
        cpu, started = sum(map(cpu_seconds, self._pids)), time.monotonic()
        answers = self._job.ask({"steps": steps})
        wall = time.monotonic() - started
        cpu = sum(map(cpu_seconds, self._pids)) - cpu
        _note(self.series, steps, wall=wall, loop=max(a["seconds"] for a in answers), cpu=cpu)
        self.losses += [sum(x) / RANKS for x in zip(*(a["losses"] for a in answers), strict=True)]
        self.norms += answers[0]["norms"]


class NotebookSide:
    """Steps under the magic, in a real kernel."""

    def __init__(self, kernel: Kernel, strategy: str) -> None:
        self._kernel = kernel
        setup = SETUP.format(ranks=RANKS, here=str(HERE), options=options_of(strategy))
        self._pids: list[int] = json.loads(kernel.run(setup).stdout.splitlines()[-1])
        self.series = Series()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.kernel_shares: list[float] = []
        self.helper_shares: list[float] = []
        self.frames: list[int] = []
        self.html_bytes = 0

    def take(self, steps: int) -> None:
        """Take steps."""
        cpu, kernel = sum(map(cpu_seconds, self._pids)), cpu_seconds(self._kernel.pid)
        everything = tree_cpu_seconds(self._kernel.pid)
        answer = self._kernel.run(CELL.format(steps=steps).strip())
        everything = tree_cpu_seconds(self._kernel.pid) - everything
        kernel = cpu_seconds(self._kernel.pid) - kernel
        cpu = sum(map(cpu_seconds, self._pids)) - cpu
        run = json.loads(self._kernel.run(NUMBERS).stdout)
        _note(self.series, steps, wall=answer.seconds, loop=run["seconds"], cpu=cpu)
        self.losses += run["losses"]
        self.norms += run["norms"]
        self.kernel_shares.append(kernel / answer.seconds)
        self.helper_shares.append(max(0.0, everything - kernel - cpu) / answer.seconds)
        self.frames.append(answer.frames)
        self.html_bytes = max(self.html_bytes, answer.html_bytes)

    def vote_figures(self, steps: int) -> dict[str, Any]:
        """Return what the votes of a step cost."""
        before = int(self._kernel.run(VOTE_NUMBER).stdout)
        self._kernel.run(CELL.format(steps=steps).strip())
        after = int(self._kernel.run(VOTE_NUMBER).stdout)
        seconds = float(self._kernel.run(VOTES).stdout)
        return {
            "microseconds_a_vote": round(1e6 * seconds, 2),
            "votes_a_step": round((after - before) / steps, 2),
        }

    def figures(self) -> dict[str, Any]:
        """Return what the notebook's own processes did."""
        return {
            "kernel_cpu_share": round(statistics.median(self.kernel_shares), 4),
            "controller_and_nannies_cpu_share": round(statistics.median(self.helper_shares), 4),
            "frames_per_cell": statistics.median(self.frames),
            "largest_frame_bytes": self.html_bytes,
        }


def options_of(strategy: str) -> dict[str, Any]:
    """Return the options of a model that is spread by a strategy."""
    return {"strategy": strategy} | ({"shard_size": 1} if strategy == "hybrid_shard" else {})


def take_in_turn(sides: Mapping[str, Any], rounds: int, steps: int) -> None:
    """Have all sides take steps, round by round; the first, which allocate, do not count."""
    for side in sides.values():
        side.take(steps)
        side.series = Series()
    for number, order in enumerate(rotated(tuple(sides), rounds), 1):
        for name in order:
            sides[name].take(steps)
        took = ", ".join(f"{name} {side.series.loop[-1]:.2f}" for name, side in sides.items())
        say(f"round {number}/{rounds}: ms per step: {took}")


def measure(rounds: int, steps: int, *, strategy: str = STRATEGY) -> dict[str, Any]:
    """Run both sides in turn, and return the figures."""
    start = machine()
    with ExitStack() as stack:
        jobs = []
        for _ in range(2):
            jobs.append(TorchrunJob("torchrun_step.py", strategy))
            stack.callback(jobs[-1].close)
        kernel = Kernel()
        stack.callback(kernel.close)
        plain, again, ours = (
            TorchrunSide(jobs[0]),
            TorchrunSide(jobs[1]),
            NotebookSide(kernel, strategy),
        )
        sides: dict[str, Any] = {"torchrun": plain, "notebook": ours, "torchrun again": again}
        take_in_turn(sides, rounds, steps)
        votes = ours.vote_figures(steps)
    difference = max(
        abs(a - b) / abs(b)
        for mine, theirs in ((ours.losses, plain.losses), (ours.norms, plain.norms))
        for a, b in zip(mine[:steps], theirs[:steps], strict=True)
    )
    a, b, double = plain.series, ours.series, again.series
    wall = comparison(b.wall, a.wall, double.wall, bound=BOUND)
    return {
        "benchmark": "step_overhead",
        "passes": wall["passes"] and difference <= _AGREEMENT,
        "wall": wall,
        "loop": comparison(b.loop, a.loop, double.loop, bound=BOUND),
        "cpu": comparison(b.cpu, a.cpu, double.cpu, bound=BOUND),
        "ms_per_step": {name: side.series.medians() for name, side in sides.items()},
        "largest_relative_difference_of_losses_and_norms": difference,
        **ours.figures(),
        "vote": votes,
        "rounds": rounds,
        "steps_per_round": steps,
        "machine": start,
    }


def _note(series: Series, steps: int, *, wall: float, loop: float, cpu: float) -> None:
    series.wall.append(1000 * wall / steps)
    series.loop.append(1000 * loop / steps)
    series.cpu.append(1000 * cpu / steps)


if __name__ == "__main__":
    sys.exit(measured_from_command(measure, __doc__, rounds=15, steps=60))
