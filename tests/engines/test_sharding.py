"""A sharded model behaves like the person's own: what is missing, gathered, written."""

from __future__ import annotations

import equality
import pytest
import torch
from coverings import pairwise
from equality import assert_equal
from programs import Program, in_one_process, on_engines

from fsdp_magic.notebook.session import Session

STRATEGIES = ("full_shard", "shard_grad_op")

START = """
import torch
import torch.nn as nn
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
"""
DATA = """
model = Net()
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(192, 6, generator=generator)
targets = torch.randn(192, 2, generator=generator)
data = list(zip(inputs, targets))
torch.set_default_dtype(torch.float32)
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)\n"
CELL = """
x, y = batch
loss = (model(x, CHOSEN) - y).pow(2).mean()
"""

HEADS = """
def block():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x, chosen):
        for each in self.blocks:
            x = x + each(x)
        return self.heads[chosen](x)
"""
EXPERTS_IN_BLOCKS = """
def expert():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.experts = nn.ModuleList([expert() for _ in range(3)])

    def forward(self, x, chosen):
        return x + self.experts[chosen](self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(6, 2)

    def forward(self, x, chosen):
        for each in self.blocks:
            x = each(x, chosen)
        return self.last(x)
"""
EXPERTS_AT_THE_TOP = """
def expert():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList([expert() for _ in range(3)])
        self.last = nn.Linear(6, 2)

    def forward(self, x, chosen):
        x = self.first(x)
        return self.last(x + self.experts[chosen](x))
"""
MODELS = {
    "heads": HEADS,
    "experts in blocks": EXPERTS_IN_BLOCKS,
    "experts at the top": EXPERTS_AT_THE_TOP,
}
CHOICES = {
    "each rank its own": "rank",
    "one rank never the other's": "(rank + micro_step) % 2 if step < 3 else 0",
}


# -- what a rank does not use


@pairwise(model=MODELS, choice=CHOICES, strategy=STRATEGIES, accumulate=[1, 2])
def test_parts_used_on_one_rank_only_train_as_in_one_process(
    session, model, choice, strategy, accumulate
):
    program = Program(
        built=START + MODELS[model] + DATA + SGD,
        cell=CELL.replace("CHOSEN", CHOICES[choice]),
    )
    measured = on_engines(session, program, strategy=strategy, accumulate=accumulate)
    assert_equal(measured, in_one_process(program, accumulate=accumulate), tolerance=1e-9)


@pairwise(model=MODELS, strategy=STRATEGIES, accumulate=[1, 2])
def test_what_no_rank_uses_has_no_gradient_and_does_not_decay(session, model, strategy, accumulate):
    program = Program(
        built=START + MODELS[model] + DATA + ADAMW, cell=CELL.replace("CHOSEN", "rank")
    )
    measured = on_engines(session, program, strategy=strategy, accumulate=accumulate)
    assert_equal(measured, in_one_process(program, accumulate=accumulate), tolerance=1e-7)
    idle = [name for name in measured.after if "s.2." in name]
    assert idle
    for name in idle:
        assert torch.equal(measured.after[name], measured.before[name])


# -- activation checkpointing by transformers itself


@pytest.mark.parametrize(
    ("reentrant", "strategy"),
    [
        (True, "full_shard"),
        (False, "shard_grad_op"),
        pytest.param(True, "shard_grad_op", marks=pytest.mark.nightly),
        pytest.param(False, "full_shard", marks=pytest.mark.nightly),
    ],
)
def test_gradient_checkpointing_of_transformers_equals_one_process(session, reentrant, strategy):
    case = equality.Case()
    checkpointed = equality.Case(
        model=case.model + "model.gradient_checkpointing_enable("
        f"gradient_checkpointing_kwargs={{'use_reentrant': {reentrant}}})\n"
    )
    measured = equality.on_engines(session, checkpointed, accumulate=2, strategy=strategy)
    assert_equal(measured, equality.single_process(case), tolerance=1e-9)


def test_looking_at_the_ranks_calls_no_model(session: Session) -> None:
    """The name of a model that was replaced, ``model (1)``, was once evaluated: a call."""
    code = """
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = [model]
"""
    session.model(code, show=False)
    session.run("earlier = model", show=False)
    session.model(code, show=False)
    session.status(show=False)
    session.train("loss = model(torch.ones(1, 3)).sum()", show=False)
