"""How long a cell that does nothing takes, against ``%%px`` on the same engines.

In one real Jupyter kernel with two engines, ``pass`` is run in turn, in rotating order, by
``%%px`` (A; blocking, all engines), ``%%px`` again (its double), the magic ``%%fsdp`` and the
Python API, ``session.run("pass", show=False)``. The time is that of the call in the kernel.
Single cells scatter by a factor of two, so what is compared is the median of each block of
rounds; the ratios of A/A then tell how far two blocks of the same differ.

    python benchmarks/cell_latency.py [--blocks 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from side_by_side import RANKS, Kernel, comparison, machine, rotated, say, summary

BOUND = 0.7
_WARM_UP = 10
_ROUNDS_IN_BLOCK = 15

SETUP = f"""
%load_ext fsdp_magic
import fsdp_magic, json, cell_latency
session = fsdp_magic.init(n={RANKS}, device="cpu", show=False)
view = session.client[:]
view.block = True
view.activate()
"""
MEASURE = """
print(json.dumps(cell_latency.in_kernel(get_ipython(), session, rounds={rounds})))
"""


def in_kernel(shell: Any, session: Any, *, rounds: int) -> dict[str, list[float]]:
    """Run the empty cell in every way, and return milliseconds by way; runs in the kernel."""
    ways: dict[str, Callable[[], Any]] = {
        "px": lambda: shell.run_cell_magic("px", "", "pass"),
        "magic": lambda: shell.run_cell_magic("fsdp", "", "pass"),
        "px again": lambda: shell.run_cell_magic("px", "", "pass"),
        "api": lambda: session.run("pass", show=False),
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    for order in rotated(tuple(ways), rounds + _WARM_UP):
        for way in order:
            started = time.perf_counter()
            ways[way]()
            took[way].append(1000 * (time.perf_counter() - started))
    return {way: values[_WARM_UP:] for way, values in took.items()}


def measure(blocks: int) -> dict[str, Any]:
    """Start a kernel and engines, and return the figures."""
    start, rounds = machine(), blocks * _ROUNDS_IN_BLOCK
    kernel = Kernel()
    try:
        kernel.run(SETUP)
        say(f"{rounds} rounds of four cells")
        took = json.loads(kernel.run(MEASURE.format(rounds=rounds)).stdout.splitlines()[-1])
    finally:
        kernel.close()
    medians = {way: _block_medians(values) for way, values in took.items()}
    px, again = medians["px"], medians["px again"]
    magic = comparison(medians["magic"], px, again, bound=BOUND)
    api = comparison(medians["api"], px, again, bound=BOUND)
    return {
        "benchmark": "cell_latency",
        "passes": magic["passes"] and api["passes"],
        "magic": magic,
        "api": api,
        "milliseconds": {way: summary(values) for way, values in took.items()},
        "ratio_of_medians": {
            way: round(summary(took[way])["median"] / summary(px)["median"], 4)
            for way in ("magic", "api", "px again")
        },
        "rounds": rounds,
        "rounds_in_block": _ROUNDS_IN_BLOCK,
        "machine": start,
    }


def _block_medians(values: Sequence[float]) -> list[float]:
    starts = range(0, len(values), _ROUNDS_IN_BLOCK)
    return [statistics.median(values[start : start + _ROUNDS_IN_BLOCK]) for start in starts]


def main() -> int:
    """Measure, print the result, and return 1 if it misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    result = measure(parser.parse_args().blocks)
    print(json.dumps(result))
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
