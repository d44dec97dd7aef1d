"""What ``--memory-limit`` costs a training step: the same steps with a limit and without.

Under a limit malloc maps each request from 128 KiB on by itself, so that freed tensors go back to
the system and leave no holes; the system then clears their pages again and again. Three pairs of
CPU engines, of which two have no limit (A and its double), take the same steps in turn.

    python benchmarks/memory_limit.py [--rounds 10] [--steps 30]
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from side_by_side import (
    HERE,
    RANKS,
    comparison,
    cpu_seconds,
    machine,
    measured_from_command,
)
from step_overhead import Series, take_in_turn

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.notebook.session import Session

BOUND = 2.0
"""What makes it worth a look: nobody trains for long under a limit that a CPU has not."""
SETUP = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import torch
from torchrun_step import LEARNING_RATE, build_data, build_model
data = build_data()
"""
MODEL = """
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
"""
CELL = "loss = model(input_ids=batch, labels=batch).loss"


class Side:
    """Two engines that train, with a limit or without."""

    def __init__(self, stack: ExitStack, limit: str | None) -> None:
        spec = InitSpec(n=RANKS, device="cpu", memory_limit=limit)
        self._session = stack.enter_context(Session(spec))
        self._session.run(SETUP, show=False)
        self._session.model(MODEL, show=False)
        self._pids = [rank.pid for rank in self._session.status(show=False)]
        self.series = Series()
        self.losses: list[float] = []

    def take(self, steps: int) -> None:
        """Take steps, and note what they took; milliseconds."""
        before = sum(map(cpu_seconds, self._pids))
        run = self._session.train(
            CELL, data="data", no_shuffle=True, micro_batch_size=8, steps=steps, show=False
        )
        spent = sum(map(cpu_seconds, self._pids)) - before
        self.series.cpu.append(1000 * spent / steps)
        self.series.loop.append(1000 * run.seconds / steps)
        self.losses += run.losses


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Run all sides in turn, and return the figures."""
    start = machine()
    with ExitStack() as stack:
        sides = {
            "without": Side(stack, None),
            "with a limit": Side(stack, "4GiB"),
            "without again": Side(stack, None),
        }
        take_in_turn(sides, rounds, steps)
    plain, limited, again = sides.values()
    assert limited.losses == plain.losses == again.losses, "they did not do the same"
    loop = comparison(limited.series.loop, plain.series.loop, again.series.loop, bound=BOUND)
    cpu = comparison(limited.series.cpu, plain.series.cpu, again.series.cpu, bound=BOUND)
    return {
        "benchmark": "memory_limit",
        "passes": loop["passes"],
        "loop": loop,
        "cpu": cpu,
        "ms_per_step": {name: side.series.medians() for name, side in sides.items()},
        "rounds": rounds,
        "steps_per_round": steps,
        "machine": start,
    }


if __name__ == "__main__":
    sys.exit(measured_from_command(measure, __doc__, rounds=10, steps=30))
