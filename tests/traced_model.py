"""A small model whose step is traced, and how tests see what torch's allocator gave."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_magic.core.planning.step_trace import OptimizerTrace
from fsdp_magic.engine.planning.passes import Program

NO_OPTIMIZER = OptimizerTrace(name="none", first=(), later=())
IDS = 64


def some_or_nightly(
    *axes: tuple[str, Collection[Any]], default: Collection[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Run a test on some cases, and on all by ``make nightly``."""
    names, values = zip(*axes, strict=True)
    cases = [
        pytest.param(*case, marks=() if case in default else pytest.mark.nightly)
        for case in product(*values)
    ]
    return pytest.mark.parametrize(",".join(names), cases)


class _Block(nn.Module):
    """Attention and a product, each around a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in self._projections()]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _projections(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


class SmallModel(nn.Module):
    """Blocks, whose table of ids is also their head."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.ids = nn.Embedding(500, width)
        self.register_buffer("places", torch.zeros(IDS, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 500, bias=False)
        self.head.weight = self.ids.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.ids(ids) + self.places
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def program_of(model: nn.Module, *, is_cuda: bool = False) -> Program:
    """Return a program whose cell keeps its batch and its output, as variables are."""
    cell: dict[str, Any] = {}

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        cell["batch"] = batch
        cell["logits"] = model(batch)
        return F.cross_entropy(cell["logits"].flatten(0, 1), batch.flatten())

    return Program(model=model, batch_of=batch_of, loss_of=loss_of, is_cuda=is_cuda)


def batch_of(samples: int) -> torch.Tensor:
    return torch.zeros(samples, IDS, dtype=torch.long)


def allocated_peak(profiler: Any) -> int:
    found = profiler.profiler.kineto_results.events()
    events = sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())
    level = peak = 0
    for event in events:
        level += event.nbytes()
        peak = max(peak, level)
    return peak
