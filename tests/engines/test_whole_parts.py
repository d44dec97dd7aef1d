"""What FSDP2 leaves whole on every rank is averaged after a person's own backward too."""

from __future__ import annotations

import pytest
import torch
from coverings import pairwise
from loops import check_weights

from fsdp_magic.errors import CellFailedError

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard")
NET = """
import torch
from torch import nn
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, parts):
        h = self.norm(self.first(x))
        if "scale" in parts:
            h = h * self.scale
        return h + self.shift if "shift" in parts else h

model = Net()
inputs, targets = torch.randn(128, 6), torch.randn(128, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.set_default_dtype(torch.float32)
"""
PARTS = {(0, 0): ("scale", "shift"), (0, 1): ("scale",), (1, 0): ("scale", "shift"), (1, 1): ()}
"""What is used, by half of a step and rank: a rank may use nothing that is whole."""
BACKWARD = """
def backward(half, rank):
    first = 32 * step + 16 * half + 8 * rank
    x, y = inputs[first : first + 8], targets[first : first + 8]
    (model(x, PARTS[half, rank]) - y).pow(2).mean().backward()
"""
STEPS = f"""
from contextlib import nullcontext
PARTS = {PARTS}
{BACKWARD}
for step in range(4):
    with fsdp.no_sync(model) if QUIET else nullcontext():
        backward(0, rank)
    backward(1, rank)
    optimizer.step()
    optimizer.zero_grad()
"""
IN_LOW_PRECISION = """
def low(self, x):
    x, weight, bias = (each.bfloat16() for each in (x, self.weight, self.bias))
    return nn.functional.linear(x, weight, bias)
def high(self, x, torchs_own=nn.BatchNorm1d.forward):
    return torchs_own(self, x.double()).bfloat16()
class LowNet(Net):
    def forward(self, x, parts):
        return super().forward(x, parts).float()
model.__class__ = LowNet
model.first.forward, model.norm.forward = low.__get__(model.first), high.__get__(model.norm)
"""
"""By hand what ``--precision bf16`` means."""


def in_one_process(precision: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    names: dict = {"PARTS": PARTS}
    exec(NET + (IN_LOW_PRECISION if precision == "bf16" else ""), names)
    model, optimizer = names["model"], names["optimizer"]
    before = weights(model)
    for names["step"] in range(4):
        for half, rank in PARTS:
            exec(f"{BACKWARD}backward({half}, {rank})", names)
        for parameter in model.parameters():
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return before, weights(model)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}


@pairwise(strategy=STRATEGIES, precision=["fp32", "bf16"], quiet=[False, True])
def test_plain_cells_train_as_one_process(session, strategy, precision, quiet):
    """All computes on the same micro-batches, so also what is rounded is rounded alike."""
    before, after = in_one_process(precision)
    size = 1 if strategy == "hybrid_shard" else None
    session.model(NET, strategy=strategy, shard_size=size, precision=precision, show=False)
    session.run(STEPS.replace("QUIET", str(quiet)), show=False)
    for name in ("model.scale", "model.shift", "model.norm.weight"):
        ours, theirs = session.pull(f"fsdp.whole({name})", rank="all")
        assert torch.equal(ours, theirs), name
    check_weights(session, before, after)


@pytest.mark.parametrize("fails", ["before", "after"])
def test_gradients_of_a_cell_that_failed_on_one_rank_are_dropped(session, fails):
    loss = "(model(inputs[:8], ('scale', 'shift')) - targets[:8]).pow(2).mean()"
    session.model(NET, show=False)
    fault = "if rank == 1: raise ValueError('on purpose')\n"
    quiet = f"with fsdp.no_sync(model):\n    {loss}.backward()\n"
    code = fault + f"{loss}.backward()" if fails == "before" else quiet + fault
    with pytest.raises(CellFailedError, match="on purpose"):
        session.run(code, show=False)
    session.run(f"{loss}.backward()", show=False)
    names: dict = {}
    exec(f"{NET}{loss}.backward()", names)
    for ours in session.pull("model.scale.grad", rank="all"):
        torch.testing.assert_close(ours, names["model"].scale.grad, rtol=1e-9, atol=1e-12)
