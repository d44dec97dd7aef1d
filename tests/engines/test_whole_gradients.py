"""Gradients of whole models: in which order, how many at a time, and when they are reduced."""

from __future__ import annotations

import pytest
import torch
from equality import assert_equal
from programs import Program, in_one_process, on_engines
from test_whole_models import NET, STRATEGIES
from whole_models import SMALL_BUCKETS, changed

from fsdp_magic.errors import CellFailedError


def test_a_reentrant_checkpoint_that_comes_later_is_refused(session):
    """The first step has seen none, so the gradient is on its way when it gets one more."""
    cell = """
from torch.utils.checkpoint import checkpoint
x, y = batch
h = torch.tanh(model.first(x))
for _ in range(2 if step else 1):
    h = h + checkpoint(model.left, h, use_reentrant=True)
loss = (model.last(h) - y).pow(2).mean()
"""
    session.model(NET, strategy="ddp", show=False)
    with (
        changed(session, SMALL_BUCKETS),
        pytest.raises(CellFailedError, match=r"model\.left\.weight.*use_reentrant=False") as caught,
    ):
        session.train(cell, data="data", steps=3, show=False)
    assert caught.value.run.steps == 1


def test_two_models_that_ranks_call_in_another_order_do_not_mix(session):
    made = """
other, model = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
data = list(zip(inputs, torch.cat([targets] * 3, 1)))
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
"""
    cell = """
x, y = batch
first, second = (model, other) if rank == 0 else (other, model)
loss = (second(torch.tanh(first(x))) - y).pow(2).mean()
"""
    program = Program(built=NET + made, cell=cell, models=("model", "other"))
    measured = on_engines(session, program, strategy="ddp")
    assert_equal(measured, in_one_process(program), tolerance=1e-9)


def test_few_copies_of_gradients_are_under_way_at_a_time(session):
    """Also where another rank lets this one wait."""
    built = """
import time, torch
from torch import nn
model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(40)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
most = 0
"""
    watch = """
def _launch(self, parameters, _o=_b.GradientReduction._launch):
    global most
    _o(self, parameters)
    most = max(most, sum(each.copied_bytes for each in self._under_way))
_b.GradientReduction._launch = _launch
"""
    cell = """
loss = model(torch.ones(1, 6)).mean()
if step and rank == 1:
    loss.register_hook(lambda _: time.sleep(0.2))
"""
    session.model(built, strategy="ddp", show=False)
    with changed(session, SMALL_BUCKETS + watch):
        session.train(cell, steps=2, show=False)
    # one may be added where there is room, and one as backward ends; 40 layers have 6,720 bytes
    most, bucket = 900, 600 + 6 * 6 * 4
    assert most < session.pull("most", rank=0) < most + 2 * bucket


def test_what_was_frozen_when_it_was_built_is_averaged_once_it_is_trained(session):
    loss = "(model(inputs[part]) - targets[part]).pow(2).mean()"
    session.model(NET + "model.left.requires_grad_(False)\n", strategy="ddp", show=False)
    session.run(
        f"part = slice(8 * rank, 8 * rank + 8)\nmodel.left.requires_grad_(True)\n{loss}.backward()",
        show=False,
    )
    names: dict = {"part": slice(0, 16)}
    exec(f"{NET}{loss}.backward()", names)
    torch.set_default_dtype(torch.float32)
    expected = names["model"].left.weight.grad
    for ours in session.pull("model.left.weight.grad", rank="all"):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_stay_on_their_rank_within_no_sync(session, strategy):
    loss = "(model(inputs[PART]) - targets[PART]).pow(2).mean()"
    session.model(NET, strategy=strategy, show=False)
    session.run(
        "from fsdp_magic.engine.parallel.gathering import no_sync\n"
        "first, last = slice(8 * rank, 8 * rank + 8), slice(8 * rank + 16, 8 * rank + 24)\n"
        f"with no_sync(model):\n    {loss.replace('PART', 'first')}.backward()\n"
        "alone = model.first.weight.grad.clone()\n"
        f"{loss.replace('PART', 'last')}.backward()",
        show=False,
    )
    names: dict = {}
    exec(NET, names)
    torch.set_default_dtype(torch.float32)
    model = names["model"]

    def gradient(*firsts: int) -> torch.Tensor:
        for first in firsts:
            eval(loss, names | {"PART": slice(first, first + 8)}).backward()
        found = model.first.weight.grad.clone()
        model.zero_grad()
        return found

    for rank, ours in enumerate(session.pull("alone", rank="all")):
        torch.testing.assert_close(ours, gradient(8 * rank), rtol=1e-9, atol=1e-12)
    for ours in session.pull("model.first.weight.grad", rank="all"):
        torch.testing.assert_close(ours, gradient(0, 8, 16, 24) / 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_a_cell_that_failed_on_one_rank_are_dropped(session, strategy):
    backward = "(model(inputs[:8]) - targets[:8]).pow(2).mean().backward()"
    session.model(NET, strategy=strategy, show=False)
    with pytest.raises(CellFailedError, match="before it"):
        session.run(f"if rank == 1: raise ValueError('before it')\n{backward}", show=False)
    session.run(backward, show=False)
    names: dict = {}
    exec(f"{NET}{backward}", names)
    torch.set_default_dtype(torch.float32)
    expected = names["model"].first.weight.grad
    for ours in session.pull("model.first.weight.grad", rank="all"):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
