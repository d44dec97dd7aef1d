"""Bytes per parameter at the peak of a step, by strategy: what theory says, and what a unit takes.

float32 with AdamW. Two micro-steps make a step, because from the second on gradients are there
while parameters are gathered, which the formulas count. Measured as the C library's allocator
counts, 200 times a second, so the transport's buffers are in it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_magic.notebook.session import Session

WIDTH, LAYERS = 1024, 12
THEORY: dict[str, Callable[[int], float]] = {
    "ddp": lambda n: 16,
    "zero1": lambda n: 8 + 8 / n,
    "shard_grad_op": lambda n: 4 + 16 / n,
    "full_shard": lambda n: 16 / n,
    # in the last backward gathered gradients go as their shards come
    "full_shard, last": lambda n: 4 + 12 / n,
}
IN_UNITS = 6
"""Above it, at 4 bytes a parameter of one unit: the unit gathered, the next one gathered, its
gradient and the buffers that it is reduced in; or three temporaries of AdamW."""
BUILD = f"""
import ctypes, gc, threading
import torch
from torch import nn
from fsdp_magic.engine import telemetry

class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear({WIDTH}, {WIDTH}, bias=False), nn.Tanh()) for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Watch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    def run(self):
        while not self.over.wait(1 / 200):
            self.peak = max(self.peak, telemetry.memory().allocated_bytes)
"""
MODEL = "model = Stack(LAYERS)\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)"
CELL = f"loss = model(torch.ones(1, {WIDTH})).square().mean()"


def peak_per_parameter(session: Session, strategy: str, **options: Any) -> float:
    """Return the highest rank's."""
    session.run(BUILD, show=False)
    for layers in (1, LAYERS):  # what is made once in a process is made with a small one
        session.run("gc.collect(); ctypes.CDLL(None).malloc_trim(0)", show=False)
        session.run("before, watch = telemetry.memory().allocated_bytes, Watch()", show=False)
        model = MODEL.replace("LAYERS", str(layers))
        session.model(model, "model", strategy=strategy, show=False, **options)
        session.train(CELL, steps=1, accumulate=2, show=False)
        session.run("watch.start()", show=False)
        session.train(CELL, steps=4, accumulate=2, show=False)
        session.run("watch.over.set(); watch.join(); peak = watch.peak - before", show=False)
        session.run("del model, optimizer, loss", show=False)
    return max(session.pull("peak", rank="all")) / (LAYERS * WIDTH**2)


_BY_DEFAULT = (("zero1", 2),)


@pytest.mark.parametrize(
    ("strategy", "engines"),
    [
        pytest.param(s, n, marks=() if (s, n) in _BY_DEFAULT else pytest.mark.nightly)
        for s in THEORY
        for n in (2, 4)
    ],
)
def test_the_peak_is_what_theory_says(world, strategy, engines):
    name, _, last = strategy.partition(", ")
    options = {"accumulate_sync": last} if last else {}
    peak = peak_per_parameter(world(engines), name, **options)
    expected, unit = THEORY[strategy](engines), 4 / LAYERS
    assert 0.98 * expected <= peak <= 1.02 * expected + IN_UNITS * unit
