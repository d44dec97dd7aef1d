"""How long ``%fsdp_init`` takes until ranks have met, against torchrun with the same imports.

A round starts torchrun with ``torchrun_startup.py`` (A), torchrun again (the double of A) and a
fresh Jupyter kernel (B), in rotating order. A ends when the first all_reduce has returned on
both ranks; B when a cell with that all_reduce has returned in the kernel, so it includes the
reply. The kernel's own start is not counted. Its import of the extension and of ipyparallel,
which ``%load_ext`` does once, is measured apart: ``init`` is %fsdp_init in a running kernel,
which the bound is on, ``load_and_init`` both. Stopping has a bound too, and must leave nothing.

    python benchmarks/startup.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from side_by_side import (
    RANKS,
    Kernel,
    TorchrunJob,
    comparison,
    machine,
    rotated,
    say,
    tree_cpu_seconds,
)

BOUND = 0.9
STOP_BOUND_SECONDS = 1.0

LOAD = """
import time
started = time.monotonic()
get_ipython().run_line_magic("load_ext", "fsdp_magic")
loaded = time.monotonic()
"""
INIT = f"""
import fsdp_magic
session = fsdp_magic.init(n={RANKS}, device="cpu", show=False)
started_all = time.monotonic()
session.run('''
import torch
import torch.distributed as dist
dist.all_reduce(torch.ones(1))
''', show=False)
print(json.dumps([loaded - started, started_all - loaded, time.monotonic() - loaded]))
"""
STOP = """
stopping = time.monotonic()
session.shutdown()
stopped = time.monotonic() - stopping
import psutil
assert not psutil.Process().children(recursive=True), "shutdown left processes behind"
print(stopped)
"""


@dataclass(kw_only=True)
class Seconds:
    """Seconds of one side, round by round.

    Attributes:
        ready: until the first all_reduce has returned.
        cpu: processor time of every process of it that is alive then.
    """

    ready: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class KernelSeconds(Seconds):
    """Seconds of the notebook's side.

    Attributes:
        load: ``%load_ext``.
        engines: the part of ``ready`` until ``init`` has returned.
        stop: ``shutdown``.
    """

    load: list[float] = field(default_factory=list)
    engines: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)


def start_torchrun(seconds: Seconds) -> None:
    """Start torchrun and stop it again."""
    job = TorchrunJob("torchrun_startup.py")
    try:
        seconds.ready.append(max(hello["done"] for hello in job.hellos) - job.started_at)
        seconds.cpu.append(tree_cpu_seconds(job.pid))
    finally:
        job.close()


def start_engines(seconds: KernelSeconds) -> None:
    """Start engines from a fresh kernel, and stop both."""
    kernel = Kernel()
    try:
        before = tree_cpu_seconds(kernel.pid)
        answer = kernel.run(f"import json\n{LOAD}{INIT}")
        load, engines, ready = json.loads(answer.stdout.splitlines()[-1])
        seconds.cpu.append(tree_cpu_seconds(kernel.pid) - before)
        seconds.load.append(load)
        seconds.engines.append(engines)
        seconds.ready.append(ready)
        seconds.stop.append(float(kernel.run(STOP).stdout))
    finally:
        kernel.close()


def measure(rounds: int) -> dict[str, Any]:
    """Start both sides in turn, and return the figures."""
    start = machine()
    start_torchrun(Seconds())  # the first of each reads its files from the disk
    start_engines(KernelSeconds())
    plain, again, ours = Seconds(), Seconds(), KernelSeconds()
    actions = {
        "torchrun": lambda: start_torchrun(plain),
        "notebook": lambda: start_engines(ours),
        "torchrun again": lambda: start_torchrun(again),
    }
    for number, order in enumerate(rotated(tuple(actions), rounds), 1):
        for name in order:
            actions[name]()
        say(
            f"round {number}/{rounds}: seconds: torchrun {plain.ready[-1]:.2f}, "
            f"again {again.ready[-1]:.2f}, load {ours.load[-1]:.2f}, init {ours.ready[-1]:.2f}"
        )
    both = [load + ready for load, ready in zip(ours.load, ours.ready, strict=True)]
    init = comparison(ours.ready, plain.ready, again.ready, bound=BOUND)
    return {
        "benchmark": "startup",
        "passes": init["passes"] and statistics.median(ours.stop) <= STOP_BOUND_SECONDS,
        "init": init,
        "load_and_init": comparison(both, plain.ready, again.ready, bound=BOUND),
        "cpu": comparison(ours.cpu, plain.cpu, again.cpu, bound=BOUND),
        "median_seconds": {
            "torchrun": _medians(plain),
            "torchrun again": _medians(again),
            "notebook": _medians(ours),
        },
        "rounds": rounds,
        "machine": start,
    }


def _medians(seconds: Seconds) -> dict[str, float]:
    return {name: round(statistics.median(values), 3) for name, values in asdict(seconds).items()}


def main() -> int:
    """Measure, print the result, and return 1 if it misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    result = measure(parser.parse_args().rounds)
    print(json.dumps(result))
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
