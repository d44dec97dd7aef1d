"""Reading and writing the parameters of a sharded model between its forwards."""

from __future__ import annotations

import pytest
import torch
from coverings import pairwise
from equality import assert_equal
from programs import Program, in_one_process, on_engines, trained

STRATEGIES = ("full_shard", "shard_grad_op")
NET = """
import torch
import torch.nn as nn
try:
    unsharded
except NameError:
    from contextlib import nullcontext as unsharded
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)

def block():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.last = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.first(x)
        for each in self.blocks:
            x = each(x)
        return self.last(x) * self.scale

model, target = Net(), Net()
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(192, 6, generator=generator)
targets = torch.randn(192, 2, generator=generator)
data = list(zip(inputs, targets))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.set_default_dtype(torch.float32)
"""
# the same however often it is run within a step, since one process runs every rank's part
UPDATE = """
for p, t in zip(model.parameters(), target.parameters()):
    t.data.copy_(p.data)
    t.data.lerp_(p.data * FACTOR, 0.2)
"""
TARGETS = {
    "without gradients": """
with torch.no_grad():
    aim = target(x)
""",
    "in inference mode": """
with torch.inference_mode():
    aim = target(x)
aim = aim.clone()
""",
    "with gradients": "\naim = target(x).detach()\n",
    "by its parts": """
with torch.no_grad():
    aim = target.last(target.blocks[1](target.first(x)))
""",
}


@pairwise(aim=TARGETS, strategy=STRATEGIES, accumulate=[1, 2])
def test_a_target_updated_in_place_is_used_as_updated(session, aim, strategy, accumulate):
    """pytorch forums' moving averages: evaluated, updated, evaluated again in one cell."""
    later = TARGETS[aim].replace("aim", "later")
    cell = (
        f"x, y = batch{UPDATE.replace('FACTOR', '0.5')}{TARGETS[aim]}"
        f"{UPDATE.replace('FACTOR', '-0.5')}{later}"
        "loss = (model(x) - y - 0.3 * aim + 0.7 * later).pow(2).mean()"
    )
    program = Program(built=NET, cell=cell, models=("model", "target"))
    measured = on_engines(session, program, strategy=strategy, accumulate=accumulate)
    assert_equal(measured, in_one_process(program, accumulate=accumulate), tolerance=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_forward_without_gradients_everything_is_a_shard(session, strategy):
    session.model(NET, strategy=strategy, show=False)
    session.run(
        "from torch.distributed.tensor import DTensor\n"
        "x = torch.ones(2, 6, dtype=torch.float64)\n"
        "with torch.no_grad():\n    model(x)\n"
        "kinds = {type(p) is DTensor or p.ndim == 0 for p in model.parameters()}\n"
        "before = model(x)\n"  # with gradients pending, a look without must not break backward
        "with torch.no_grad():\n    model(x)\n"
        "before.sum().backward()\n"
        "one = model.first.bias.grad.full_tensor().clone()\n"
        "optimizer.zero_grad()\n"
        "model(x).sum().backward()\n"
        "two = model.first.bias.grad.full_tensor()",
        show=False,
    )
    assert session.pull("kinds", rank="all") == [{True}, {True}]
    assert torch.equal(session.pull("one"), session.pull("two"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_never_stale_after_an_optimizer_step(session, strategy):
    """A forward with gradients, but without backward, leaves parameters gathered."""
    session.model(NET, strategy=strategy, show=False)
    session.run(
        "x = torch.ones(2, 6, dtype=torch.float64)\n"
        "model(x).sum().backward()\n"
        "accuracy = model(x).detach()\n"
        "optimizer.step()\n"
        "after = model(x).detach()",
        show=False,
    )
    session.run("again = model(x).detach()", show=False)
    assert torch.equal(session.pull("after"), session.pull("again"))
    assert not torch.equal(session.pull("after"), session.pull("accuracy"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_first_used_in_inference_mode_trains(session, strategy):
    program = Program(built=NET, cell="x, y = batch\nloss = (model(x) - y).pow(2).mean()")
    session.model(NET, strategy=strategy, show=False)
    session.run(
        "with torch.inference_mode():\n    model(torch.ones(2, 6, dtype=torch.float64))", show=False
    )
    assert_equal(trained(session, program), in_one_process(program), tolerance=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_parameters_may_be_used_in_a_loss(session, strategy):
    session.run("from fsdp_magic.engine.parallel.gathering import unsharded", show=False)
    cell = """
x, y = batch
h = model.first(x)
with unsharded(model):
    tied = h @ model.first.weight.T + model.blocks[1][0].bias
    decay = model.blocks[0][0].weight.pow(2).sum() + model.last.weight.sum()
out = model(tied)
with unsharded(model.blocks[0]):
    late = (out @ model.last.weight).mean() + model.blocks[0][0].bias.sum()
loss = (out - y).pow(2).mean() + 0.01 * decay + 0.1 * late
"""
    program = Program(built=NET, cell=cell)
    measured = on_engines(session, program, strategy=strategy)
    assert_equal(measured, in_one_process(program), tolerance=1e-9)


def test_a_loss_of_whole_parameters_alone_is_reduced(session):
    session.run("from fsdp_magic.engine.parallel.gathering import unsharded", show=False)
    cell = """
with unsharded(model):
    loss = sum(p.pow(2).sum() for p in model.parameters()) * (rank + 1)
"""
    program = Program(built=NET, cell=cell)
    assert_equal(on_engines(session, program), in_one_process(program), tolerance=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_while_whole_is_kept(session, strategy):
    session.model(NET, strategy=strategy, show=False)
    session.run(
        "from fsdp_magic.engine.parallel.gathering import unsharded\n"
        "x = torch.ones(2, 6, dtype=torch.float64)\n"
        "with torch.no_grad(), unsharded(model):\n"
        "    shapes = {tuple(p.shape) == tuple(p.data.shape) for p in model.parameters()}\n"
        "    plain = {type(p) for p in model.parameters()}\n"
        "    for p in model.parameters():\n        p.data.fill_(0.25)\n"
        "    inside = model(x)\n"
        "    model.last.weight[1, 2] = 7.0\n"
        "outside = model(x)",
        show=False,
    )
    weights = session.pull("dict(model.named_parameters())")
    assert session.pull("[kind.__name__ for kind in plain]") == ["Parameter"]
    assert weights["last.weight"][1, 2] == 7.0
    weights["last.weight"][1, 2] = 0.25
    assert all((tensor == 0.25).all() for tensor in weights.values())
    assert not torch.equal(session.pull("inside"), session.pull("outside"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_cleared_between_forward_and_backward_are_gone(session, strategy):
    session.model(NET, strategy=strategy, show=False)
    session.run(
        "from fsdp_magic.engine.parallel.gathering import clear_gradients, no_sync\n"
        "x = torch.ones(2, 6, dtype=torch.float64)\n"
        "def gradients():\n"
        "    return {n: p.grad.full_tensor() if p.ndim else p.grad.clone()\n"
        "            for n, p in model.named_parameters()}\n"
        "model(x).sum().backward()\n"
        "once = gradients()\n"
        "loss = model(x).sum()\n"
        "clear_gradients(model)\n"
        "loss.backward()\n"
        "cleared = gradients()\n"
        "clear_gradients(model)\n"
        "with no_sync(model):\n    model(x).sum().backward()\n"
        "clear_gradients(model)\n"
        "model(x).sum().backward()\n"
        "unsynced = gradients()\n"
        "clear_gradients(model)\n"
        "with no_sync(model):\n    model(x).sum().backward()\n"
        "model(x).sum().backward()\n"
        "twice = gradients()\n"
        "loss = model(x).sum()\n"
        "clear_gradients(model.first)\n"
        "left = {n for n, p in model.named_parameters() if p.grad is None}\n"
        "loss.backward()\n"
        "optimizer.zero_grad()\n"
        "left_of_all = {p.grad for p in model.parameters()}",
        show=False,
    )
    once, cleared, twice = (session.pull(name) for name in ("once", "cleared", "twice"))
    for name, gradient in once.items():
        torch.testing.assert_close(cleared[name], gradient)
        torch.testing.assert_close(session.pull("unsynced")[name], gradient)
        torch.testing.assert_close(twice[name], 2 * gradient)
    assert session.pull("left_of_all") == {None}
