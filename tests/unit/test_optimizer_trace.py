"""What an optimizer's trace says is taken is what torch's allocator takes in its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_magic.core.planning.step_trace import OptimizerAllocated, OptimizerTrace
from fsdp_magic.engine import optimizer_state
from fsdp_magic.engine.planning.optimizer_trace import trace_optimizers
from tests.traced_model import allocated_peak


class _Own(torch.optim.Optimizer):
    """One of a person's own, which makes its state from a shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["mean"] = state.get("mean", torch.zeros(p.shape)) * 0.9 + p.grad
            p -= 0.1 * state["mean"].sign()


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW (per parameter)": lambda p: torch.optim.AdamW(p),
    "AdamW (foreach)": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW (fused)": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam (per parameter)": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "SGD (per parameter)": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD (foreach)": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "RMSprop (per parameter)": lambda p: torch.optim.RMSprop(p, centered=True),
    "NAdam (per parameter)": lambda p: torch.optim.NAdam(p),
    "Adafactor (per parameter)": lambda p: torch.optim.Adafactor(p),
    "_Own": _Own,
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_takes_what_the_allocator_gives(name: str) -> None:
    """Peak and rest of a first step and of a later one, from stand-ins of other sizes."""
    model = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 100))
    optimizer = _OPTIMIZERS[name](model.parameters())
    trace = trace_optimizers([optimizer], {id(p): n for n, p in model.named_parameters()})
    assert trace.name == name
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    elements = {n: p.numel() for n, p in model.named_parameters()}
    assert _optimizer_peaks(trace, elements) == pytest.approx(
        _measured_optimizer_peaks(optimizer, model), abs=64
    )


def _traced(optimizer: torch.optim.Optimizer, model: nn.Module, **options: bool) -> OptimizerTrace:
    names = {id(p): name for name, p in model.named_parameters()}
    return trace_optimizers([optimizer], names, **options)


def test_on_cuda_the_default_is_that_of_cuda_and_the_optimizer_is_left_as_it_was() -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    lists = torch.optim.AdamW(model.parameters(), foreach=True)
    assert _traced(optimizer, model, is_cuda=True) == _traced(lists, model)
    (group,) = optimizer.param_groups
    assert (group["foreach"], group["capturable"]) == (None, True)
    assert not optimizer.state


def test_state_that_is_made_with_the_optimizer_counts() -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.Adagrad(model.parameters())
    before = {id(p): id(state) for p, state in optimizer.state.items()}
    made = [e for e in _traced(optimizer, model).first if isinstance(e, OptimizerAllocated)]
    kept = {e.parameter: e.per_element for e in made if e.kind == "optimizer" and e.per_element}
    assert kept == {"weight": 4, "bias": 4}
    assert {id(p): id(state) for p, state in optimizer.state.items()} == before


def _optimizer_peaks(trace: OptimizerTrace, elements: dict[str, int]) -> list[float]:
    """Return the most that is held in a first and a later step, and what is left after each."""
    level, found, before = 0.0, [], {}
    for events in (trace.first, trace.later):
        peak, live = level, {}
        for event in events:
            if isinstance(event, OptimizerAllocated):
                size = event.fixed + event.per_element * elements.get(event.parameter, 0)
                live[event.id] = size
                level += size
                peak = max(peak, level)
            else:
                level -= before.pop(event.id, 0) if event.carried else live.pop(event.id)
        found += [peak, level]
        before |= live
    return found


def _measured_optimizer_peaks(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[int]:
    found, level = [], 0
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            optimizer_state.make_missing([optimizer])  # as the engine does
            optimizer.step()
        kept = sum(
            e.nbytes()
            for e in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
            if e.name() == "[memory]"
        )
        found += [level + allocated_peak(profiler), level + kept]
        level += kept
    return found
