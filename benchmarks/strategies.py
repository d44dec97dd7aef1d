"""What a step of each strategy costs beside the same written by hand for torchrun.

The measurement is that of ``step_overhead.py``, strategy by strategy: processor time of the ranks
per step, and wall time, each with two identical torchrun jobs beside ours. By hand means what
torch has: FSDP2, DDP, DDP with ZeroRedundancyOptimizer.

    python benchmarks/strategies.py [--rounds 15] [--steps 40] [--strategies ddp,zero1]
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from side_by_side import machine, say
from step_overhead import measure

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "zero1", "ddp")
_FIGURES = ("passes", "cpu", "wall", "ms_per_step", "rounds")


def main() -> int:
    """Measure, print the result, and return 1 if a strategy misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    options = parser.parse_args()
    start, results = machine(), dict[str, Any]()
    for strategy in options.strategies.split(","):
        say(strategy)
        result = measure(options.rounds, options.steps, strategy=strategy)
        difference = result["largest_relative_difference_of_losses_and_norms"]
        results[strategy] = {name: result[name] for name in _FIGURES} | {"difference": difference}
    # the bound is on processor time: two cores and four ranks make wall time a lottery
    passes = all(each["cpu"]["passes"] for each in results.values())
    result = {"benchmark": "strategies", "passes": passes, "strategies": results, "machine": start}
    print(json.dumps(result))
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
