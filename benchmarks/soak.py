"""Whether a long session stays as small and as quick as it began.

In one real Jupyter kernel: 500 cells of every kind on two engines (empty, printing, a last
expression, a display, one that fails on a rank, two training steps); then one run of 10,000 tiny
steps; then, on four engines, a million printed lines, and lines without end that are interrupted.
Meanwhile this script reads from outside how much every process holds. A slope is that of a
straight line through the samples after the first fifth, in which caches fill.

    python benchmarks/soak.py [--cells 500] [--steps 10000] [--lines 1000000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
from side_by_side import Kernel, machine, say

MIB = 2**20
BOUNDS = {"cells": 8192.0, "steps": 512.0}
"""Bytes of resident memory that a process may grow by per cell, or per step: a notebook keeps what
was typed, and a run its losses, norms and samples of each rank."""
INTERRUPT_SECONDS = 2.0
_SAMPLES = 50

SETUP = """
import json, os
%load_ext fsdp_magic
import fsdp_magic
session = fsdp_magic.init(n={n}, device="cpu", show=False)
print(json.dumps([rank.pid for rank in session.status(show=False)]))
"""
MODEL = """%%fsdp_model
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
TRAIN = "%%fsdp_train --steps {steps}\nloss = model(torch.ones(2, 4)).square().mean()"
KINDS = (
    "%%fsdp\npass",
    "%%fsdp\nprint('a line of rank', rank)\nprint('a line of all')",
    "%%fsdp\n{'rank': rank}",
    "%%fsdp\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>shown</b>'))",
    "try:\n    session.run('assert rank == 0')\nexcept fsdp_magic.errors.CellFailedError: pass",
    TRAIN.format(steps=2),
)
FLOOD = "%%fsdp\nfor i in range({lines}):\n    print('line', i, 'of rank', rank)"
ENDLESS = "%%fsdp\nwhile True:\n    print('one more line of rank', rank)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a process held at a moment. ``at`` counts what was done until then."""

    at: float
    resident_bytes: int
    descriptors: int
    threads: int


class Watched:
    """The processes of a session, by name: the kernel, what serves it, and its engines.

    Args:
        kernel: its process id.
        engines: theirs.
    """

    def __init__(self, kernel: int, engines: Sequence[int]) -> None:
        named = {"kernel": psutil.Process(kernel)}
        named |= {f"engine {rank}": psutil.Process(pid) for rank, pid in enumerate(engines)}
        known = {process.pid for process in named.values()}
        for child in psutil.Process(kernel).children(recursive=True):
            if child.pid not in known and child.name() == "fsdp controller":
                named["controller"] = child
            elif child.ppid() == kernel and "fork_server" in " ".join(child.cmdline()):
                named["fork server"] = child
        self._processes = named
        self.samples: dict[str, list[Sample]] = {name: [] for name in named}

    def look(self, at: float) -> None:
        """Take a sample of each."""
        for name, process in self._processes.items():
            with suppress(psutil.NoSuchProcess), process.oneshot():
                self.samples[name].append(
                    Sample(
                        at=at,
                        resident_bytes=process.memory_info().rss,
                        descriptors=process.num_fds(),
                        threads=process.num_threads(),
                    )
                )

    def slopes(self) -> dict[str, dict[str, float]]:
        """Return by process what it gained per unit of ``at``, and what it held in the end."""
        return {name: _slopes(samples) for name, samples in self.samples.items()}


def _slopes(samples: Sequence[Sample]) -> dict[str, float]:
    settled = samples[len(samples) // 5 :]
    moments = [sample.at for sample in settled]

    def slope(value: Callable[[Sample], float]) -> float:
        fit = statistics.linear_regression(moments, [value(sample) for sample in settled])
        return round(fit.slope, 6)

    return {
        "resident_bytes": slope(lambda sample: sample.resident_bytes),
        "descriptors": slope(lambda sample: sample.descriptors),
        "threads": slope(lambda sample: sample.threads),
        "resident_mib_first": round(settled[0].resident_bytes / MIB, 1),
        "resident_mib_last": round(settled[-1].resident_bytes / MIB, 1),
        "descriptors_last": settled[-1].descriptors,
        "threads_last": settled[-1].threads,
    }


@contextmanager
def session(n: int) -> Iterator[tuple[Kernel, Watched]]:
    """Yield a kernel with engines, and what watches them."""
    kernel = Kernel()
    try:
        pids = json.loads(kernel.run(SETUP.format(n=n)).stdout.splitlines()[-1])
        yield kernel, Watched(kernel.pid, pids)
    finally:
        kernel.close()


def cells(kernel: Kernel, watched: Watched, count: int) -> dict[str, Any]:
    """Run many cells, and return the slopes per cell."""
    kernel.run(MODEL)
    took: list[float] = []
    for number in range(count):
        took.append(kernel.run(KINDS[number % len(KINDS)]).seconds)
        if number % max(1, count // _SAMPLES) == 0:
            watched.look(number)
    part = max(len(KINDS), count // 5)
    quick = [statistics.median(took[:part]), statistics.median(took[-part:])]
    return {
        "count": count,
        "milliseconds_first_and_last_fifth": [round(1000 * seconds, 2) for seconds in quick],
        "slopes_per_cell": watched.slopes(),
    }


def steps(kernel: Kernel, watched: Watched, count: int) -> dict[str, Any]:
    """Train many tiny steps in one run, and return the slopes per step."""
    done, rate = threading.Event(), 0.25
    began = time.monotonic()

    def look() -> None:
        while not done.wait(rate):
            watched.look(time.monotonic() - began)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        answer = kernel.run(TRAIN.format(steps=count))
    finally:
        done.set()
        watcher.join()
    per_second = count / answer.seconds
    slopes = watched.slopes()
    for values in slopes.values():  # sampled by time; a run's steps are of one length
        for name in ("resident_bytes", "descriptors", "threads"):
            values[name] = round(values[name] / per_second, 6)
    return {"count": count, "seconds": round(answer.seconds, 1), "slopes_per_step": slopes}


def flood(kernel: Kernel, watched: Watched, lines: int, ranks: int) -> dict[str, Any]:
    """Print many lines, then lines without end, and return how the kernel bore it."""
    kernel.run("%%fsdp\npass")
    watched.look(0)
    answer = kernel.run(FLOOD.format(lines=lines // ranks))
    watched.look(1)
    shown = answer.stdout.count("\n")
    seconds = kernel.interrupted(ENDLESS, after=3.0)
    watched.look(2)
    again = kernel.run("%%fsdp\nprint('here')")
    grown = {
        name: [round((s.resident_bytes - first.resident_bytes) / MIB, 1) for s in rest]
        for name, (first, *rest) in watched.samples.items()
    }
    return {
        "lines": lines,
        "ranks": ranks,
        "seconds": round(answer.seconds, 2),
        "lines_shown": shown,
        "interrupt_seconds": round(seconds, 2),
        "cell_after_it_milliseconds": round(1000 * again.seconds, 1),
        "resident_mib_grown_after_flood_and_interrupt": grown,
    }


def measure(count: int, step_count: int, lines: int) -> dict[str, Any]:
    """Run everything, and return the figures."""
    start = machine()
    with session(2) as (kernel, watched):
        say(f"{count} cells")
        of_cells = cells(kernel, watched, count)
        say(f"{step_count} steps")
        of_steps = steps(kernel, Watched(kernel.pid, _engines(kernel)), step_count)
    with session(4) as (kernel, watched):
        say(f"{lines} lines from 4 ranks")
        of_flood = flood(kernel, watched, lines, 4)
    return {
        "benchmark": "soak",
        "passes": all(
            (
                _flat(of_cells["slopes_per_cell"], BOUNDS["cells"], count),
                _flat(of_steps["slopes_per_step"], BOUNDS["steps"], step_count),
                of_flood["interrupt_seconds"] <= INTERRUPT_SECONDS,
            )
        ),
        "bounds": BOUNDS,
        "cells": of_cells,
        "steps": of_steps,
        "flood": of_flood,
        "machine": start,
    }


def _engines(kernel: Kernel) -> list[int]:
    answer = kernel.run("print(json.dumps([r.pid for r in session.status(show=False)]))")
    pids: list[int] = json.loads(answer.stdout.splitlines()[-1])
    return pids


def _flat(slopes: dict[str, dict[str, float]], bound: float, count: int) -> bool:
    """Return whether nothing grew: memory within its bound, not one descriptor or thread."""
    return all(
        of["resident_bytes"] <= bound
        and of["descriptors"] * count < 1
        and of["threads"] * count < 1
        for of in slopes.values()
    )


def main() -> int:
    """Measure, print the result, and return 1 if it misses its bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    asked = parser.parse_args()
    result = measure(asked.cells, asked.steps, asked.lines)
    print(json.dumps(result))
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
