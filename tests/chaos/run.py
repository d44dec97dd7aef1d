"""Cases of the chaos suite by hand: one seed again, or very many; says what each did.

python tests/chaos/run.py --seed 123                 # the live case of a seed
python tests/chaos/run.py --seed 7 --kind world      # fresh engines afterwards
python tests/chaos/run.py --cases 1000 --result FILE # of all kinds, with a result
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from cases import Case, draw  # noqa: E402  after the path that it is found on
from checks import Outcome  # noqa: E402
from left_over import growth  # noqa: E402
from side_by_side import machine  # noqa: E402
from stage import Stage  # noqa: E402
from starting import do  # noqa: E402

HANG_SECONDS = 60.0


def mixed(seed: int, count: int) -> Iterator[Case]:
    """Yield very many cases: most live ones on two ranks, then on three, then with fresh worlds."""
    chance = random.Random(seed)
    for number in range(count):
        part = number / count
        kind, ranks = ("live", 2) if part < 0.75 else ("live", 3) if part < 0.85 else ("world", 2)
        if part > 0.95:
            ranks = 3
        yield draw(chance.randrange(10**9), kind, ranks=ranks)


def series(stage: Stage, cases: Iterable[Case]) -> list[Outcome]:
    """Do cases one after the other; one that hangs ends this process with every stack."""
    outcomes = []
    for case in cases:
        print(f"{case} ", end="", flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        started = time.monotonic()
        outcomes.append(do(stage, case))
        faulthandler.cancel_dump_traceback_later()
        print(f"{outcomes[-1].ending} [{time.monotonic() - started:.2f} s in all]", flush=True)
    return outcomes


def result(seed: int, outcomes: list[Outcome], stage: Stage, seconds: float) -> dict[str, Any]:
    """Return the figures of a series."""
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault(outcome.case.fault, []).append(outcome)
    slowest = max(outcomes, key=lambda outcome: outcome.seconds or 0.0)
    restarts = [o.restart_seconds for o in outcomes if o.restart_seconds is not None]
    return {
        "benchmark": "chaos",
        "passes": not any(outcome.problems for outcome in outcomes),
        "seed": seed,
        "cases": len(outcomes),
        "lost": [str(outcome) for outcome in outcomes if outcome.problems],
        "by_fault": {fault: _figures(some) for fault, some in sorted(by_fault.items())},
        "longest_recovery": {"seconds": round(slowest.seconds or 0.0, 2), "case": str(slowest)},
        "longest_restart_seconds": round(max(restarts, default=0.0), 2),
        "seconds": round(seconds),
        "machine": machine(),
    }


def _figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return how many cases of a fault there were, and what recovery took, in seconds."""
    took = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return {
        "cases": len(outcomes),
        "lost": sum(bool(outcome.problems) for outcome in outcomes),
        "median_seconds": round(statistics.median(took), 3) if took else None,
        "longest_seconds": round(max(took), 2) if took else None,
    }


def main() -> int:
    """Do the cases, and return 1 if any was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="without it: of today's date")
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--kind", choices=("live", "world", "mixed"), default="live")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--result", type=Path, help="write the figures here, of mixed cases")
    asked = parser.parse_args()
    seed = asked.seed
    if seed is None:
        seed = int(datetime.date.today().strftime("%Y%m%d"))
    seeds = range(seed, seed + asked.cases)
    cases: Iterable[Case] = (draw(each, asked.kind, ranks=asked.ranks) for each in seeds)
    if asked.result is not None or asked.kind == "mixed":
        cases = mixed(seed, asked.cases)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stage, started = Stage(), time.monotonic()
    try:
        outcomes = series(stage, cases)
        print("left open:", growth(stage.held) if stage.held else "not looked at")
    finally:
        stage.close()
    figures = result(seed, outcomes, stage, time.monotonic() - started)
    if asked.result is not None:
        asked.result.write_text(json.dumps(figures) + "\n")
    print(f"{len(outcomes)} cases, lost: {figures['lost'] or 'none'}")
    return 0 if figures["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
