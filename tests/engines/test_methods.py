"""Parts and methods of a sharded model that are called by themselves train as in one process."""

from __future__ import annotations

import pytest
from coverings import pairwise
from equality import assert_equal
from programs import Program, in_one_process, on_engines

from fsdp_magic.errors import CellFailedError

STRATEGIES = ("full_shard", "shard_grad_op")
BUILT = """
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.dec = nn.Linear(6, 2)
        self.weight = nn.Parameter(0.2 * torch.randn(6, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mean, self.spread = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.decode(self.encode(x)[0])

    def encode(self, x):
        x = self.enc(x)
        for each in self.h:
            x = each(x)
        return self.mean(x), self.spread(x)

    def decode(self, z):
        return self.dec(z)

    def get_value(self, x):
        return F.linear(x, self.weight) * self.scale + x @ self.mean.weight

model = Vae()
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(192, 6, generator=generator)
targets = torch.randn(192, 2, generator=generator)
data = list(zip(inputs, targets))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.set_default_dtype(torch.float32)
"""
CELLS = {
    "encode, decode": """
mean, spread = model.encode(x)
loss = (model.decode(mean + 0.1 * spread) - y).pow(2).mean()
""",
    "a method that uses parameters": """
value = torch.tanh(model.get_value(x))
loss = (model.decode(value) - y).pow(2).mean() + model.get_value(value).pow(2).mean()
""",
    "a part, twice, then the whole": """
h = model.enc(model.enc(x))
loss = (model(h) - y).pow(2).mean() + (model.dec(h) - y).pow(2).mean()
""",
    "the whole, then parts": """
out = model(x)
loss = (out - y).pow(2).mean() + model.enc(x).mean() + model.dec(model.mean(x)).pow(2).mean()
""",
    "parts of a block": """
loss = (model.dec(model.h[0].mlp(x) + model.h[1](x)) - y).pow(2).mean()
loss = loss + model.h[0].mlp.up(model.h[0].norm(x)).pow(2).mean()
""",
    "in an order of their own": """
a, b = model.dec(x), model.enc(x)
c = model.h[1].mlp(b)
loss = (model.dec(c) + a - y).pow(2).mean() + model.spread(b).pow(2).mean()
model(x)
""",
    "forward without a call": """
loss = (model.forward(x) - y).pow(2).mean() + model.h[0].forward(model.enc.forward(x)).mean()
""",
    "checkpointed": """
from torch.utils.checkpoint import checkpoint
h = checkpoint(model.enc, x, use_reentrant=False)
h = checkpoint(model.h[0].mlp, h, use_reentrant=False)
h = checkpoint(model.h[1], h, use_reentrant=True)
h = checkpoint(model.mean, h, use_reentrant=True)
loss = (checkpoint(model, h, use_reentrant=False) - y).pow(2).mean() + model.dec(h).mean()
""",
    "with some of it unused": """
with torch.no_grad():
    target = model.enc(x) + model(x).mean()
loss = (model.enc(x) - target).pow(2).mean() + (model.dec(target) - y).pow(2).mean()
""",
}


def program_of(cell: str) -> Program:
    return Program(built=BUILT, cell="x, y = batch" + CELLS[cell])


@pairwise(cell=CELLS, strategy=STRATEGIES, accumulate=[1, 2])
def test_methods_and_parts_train_as_in_one_process(session, cell, strategy, accumulate):
    program = program_of(cell)
    measured = on_engines(session, program, strategy=strategy, accumulate=accumulate)
    assert_equal(measured, in_one_process(program, accumulate=accumulate), tolerance=1e-9)


def test_a_method_without_tensors_sees_the_shards(session):
    """Initialising in place must reach the shards."""
    session.model(
        BUILT + "def zero(self):\n    with torch.no_grad():\n        self.weight.zero_()\n"
        "Vae.zero = zero\nmodel = Vae()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        show=False,
    )
    session.run("model.zero()", show=False)
    assert session.pull("model.weight").abs().max() == 0


def test_a_part_that_raised_can_be_called_again(session):
    session.model(BUILT, show=False)
    session.run(
        "try:\n    model.enc(torch.ones(2, 7, dtype=torch.float64))\n"
        "except RuntimeError as error:\n    caught = str(error)\n"
        "out = model.enc(torch.ones(2, 6, dtype=torch.float64))\n"
        "both = model(out)",
        show=False,
    )
    assert "shapes cannot be multiplied" in session.pull("caught")


def test_a_sharded_parameter_used_directly_says_what_to_type(session):
    session.model(BUILT, show=False)
    with pytest.raises(CellFailedError, match=r"with fsdp.unsharded\(model\):"):
        session.run("torch.ones(2, 6, dtype=torch.float64) @ model.weight.T")
    with pytest.raises(CellFailedError, match=r"ema = copy.deepcopy\(model\)"):
        session.run("import copy\nema = copy.deepcopy(model)")
