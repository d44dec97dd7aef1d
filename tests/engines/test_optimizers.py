"""Optimizers work on shards as in one process, whenever and however they were made."""

from __future__ import annotations

import pytest
from coverings import pairwise
from equality import assert_equal
from programs import Program, in_one_process, on_engines, trained

from fsdp_magic.errors import FsdpError
from fsdp_magic.notebook.session import Session

NET = """
import torch
import torch.nn as nn
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)

def block():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for each in self.blocks:
            x = each(x)
        return self.last(x) * self.scale

model = Net()
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(192, 6, generator=generator)
targets = torch.randn(192, 3, generator=generator)
data = list(zip(inputs, targets))
torch.set_default_dtype(torch.float32)
"""
CELL = "x, y = batch\nloss = (model(x) - y).pow(2).mean()"
GROUPS = """
groups = [
    {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim != 2], "lr": 0.003},
]
"""
# Muon orthogonalises in bfloat16, where rounding grows to percents; here it stays in float64
MUON = """
class Exact(torch.optim.Muon):
    def step(self, closure=None):
        torch.Tensor.bfloat16 = lambda tensor: tensor
        try:
            return super().step(closure)
        finally:
            del torch.Tensor.bfloat16

optimizer = Exact([p for p in model.parameters() if p.ndim == 2], lr=0.02)
others = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
"""
OPTIMIZERS = {
    "SGD": "SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=FOREACH)",
    "Adam": "Adam(groups, lr=0.01, amsgrad=True, foreach=FOREACH)",
    "AdamW": "AdamW(groups, lr=0.01, foreach=FOREACH)",
    "Adagrad": "Adagrad(groups, lr=0.05, foreach=FOREACH)",
    "RMSprop": "RMSprop(groups, lr=0.01, momentum=0.5, centered=True, foreach=FOREACH)",
    "NAdam": "NAdam(groups, lr=0.01, foreach=FOREACH)",
}
PLACES = ("in the cell of the model", "in a cell before", "in a cell after")


def made(name: str, foreach: bool) -> str:
    return f"{GROUPS}optimizer = torch.optim.{OPTIMIZERS[name].replace('FOREACH', str(foreach))}\n"


def trained_with(session: Session, program: Program, optimizer: str, place: str):
    if place == "in the cell of the model":
        return on_engines(session, program)
    if place == "in a cell before":
        session.run(program.built, show=False)
        session.model("pass", "model", show=False)
    else:
        session.model(program.built.replace(optimizer, ""), show=False)
        session.run(optimizer, show=False)
    return trained(session, program)


@pairwise(name=OPTIMIZERS, foreach=[True, False], place=PLACES)
def test_an_optimizer_equals_one_process(session, name, foreach, place):
    optimizer = made(name, foreach)
    program = Program(built=NET + optimizer, cell=CELL)
    measured = trained_with(session, program, optimizer, place)
    # those that divide by the gradient's own size let the rounding of a small one grow
    assert_equal(measured, in_one_process(program), tolerance=1e-9 if name == "SGD" else 1e-7)


@pytest.mark.parametrize("place", PLACES)
def test_muon_equals_one_process(session, place):
    program = Program(built=NET + MUON, cell=CELL, optimizers=("optimizer", "others"))
    measured = trained_with(session, program, MUON, place)
    assert_equal(measured, in_one_process(program), tolerance=1e-7)


def test_muon_as_it_is_equals_one_process_roughly(session):
    muon = MUON.replace("= Exact(", "= torch.optim.Muon(")
    program = Program(built=NET + muon, cell=CELL, optimizers=("optimizer", "others"))
    assert_equal(on_engines(session, program), in_one_process(program), tolerance=0.2)


@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.Adafactor(model.parameters())",
        "transformers.optimization.Adafactor(model.parameters())",
    ],
)
def test_adafactor_is_refused_with_what_to_type(session, optimizer):
    session.model(f"{NET}\nimport transformers\noptimizer = {optimizer}", show=False)
    with pytest.raises(FsdpError, match=r"type: optimizer = torch.optim.AdamW\(model.param") as e:
        session.train(CELL, data="data", steps=1, show=False)
    assert len(str(e.value).splitlines()) == 1


def test_lbfgs_is_refused_with_what_to_type(session):
    session.model(f"{NET}optimizer = torch.optim.LBFGS(model.parameters())", show=False)
    with pytest.raises(FsdpError, match=r"add --manual and call optimizer.step\(closure\)"):
        session.train(CELL, data="data", steps=1, show=False)
