"""One process computing in bf16 or fp16: what the engines must equal, and within which bound.

Weights are fp32; forward sees copies of them in the low dtype, as the data; what comes out is
fp32 again. Nothing of the package is used.

The bound. Let u be half of the dtype's epsilon. A sample's activations and their gradients do not
depend on the other samples, and all weights of samples here are powers of two, so ranks compute
the same numbers for it as one process. What differs is how gradients of a parameter are added up:
each backward adds those of its samples in fp32 and rounds the sum once, which is off by u of it;
the sums of backwards are added in fp32, which is off by nothing beside that. So if g is the
gradient of one backward over all samples, and g_k those of the parts, each computed in one
process, then |ours - g| <= u (sum |g_k| + |g|), to first order in u, for each element. (For a
norm's parameters 2 u: torch's threads round the sums of their rows, and then that of those.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.func import functional_call

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SECOND_ORDER = 1.01
"""For u squared, and for fp32."""

BUILT = """
import torch
import torch.nn as nn

torch.manual_seed(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(24, 48), nn.LayerNorm(48), nn.Linear(48, 24)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 24)
        self.register_buffer("shift", (torch.arange(24.0) - 12) / 16)  # makes sums fp32
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(24, 3)

    def forward(self, x):
        x = self.first(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.last(x)

model = Net()
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(256, 10, generator=generator)
targets = torch.randn(256, 3, generator=generator)
data = list(zip(inputs, targets))
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
"""
CELL = """
x, y = batch
loss = (model(x) - y).pow(2).mean() * FACTOR
"""


def roundings(name: str) -> int:
    """Return how often the sum over samples is rounded for a parameter."""
    return 2 if ".norm." in name else 1


def built(*, lr: float = 0.125, momentum: float = 0.0) -> str:
    """Return the code that builds the program."""
    return BUILT.replace("LR", repr(lr)).replace("MOMENTUM", repr(momentum))


def cell(factor: float = 0.125) -> str:
    """Return the training cell."""
    return CELL.replace("FACTOR", repr(factor))


def loss_in(names: dict[str, Any], dtype: torch.dtype, part: slice, factor: float) -> torch.Tensor:
    """Return the loss of some samples, computed in a dtype."""
    model = names["model"]
    low = {name: p.to(dtype) for name, p in model.named_parameters()}
    low["shift"] = model.shift.to(dtype)  # exact, and what the sum is rounded to
    out = functional_call(model, low, (names["inputs"][part].to(dtype),)).float()
    return (out - names["targets"][part]).pow(2).mean() * factor


def gradients(
    names: dict[str, Any], dtype: torch.dtype, parts: list[slice], *, factor: float, scale: float
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the gradient that each part adds to that of all, divided by the scale again."""
    whole = max(part.stop for part in parts) - min(part.start for part in parts)
    named = dict(names["model"].named_parameters())
    for part in parts:
        share = (part.stop - part.start) / whole
        loss = loss_in(names, dtype, part, factor) * (share * scale)
        found = torch.autograd.grad(loss, list(named.values()))
        yield {n: g / scale for n, g in zip(named, found, strict=True)}
