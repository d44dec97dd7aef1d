"""Optimizer state is made before the last vote, and is what the step itself would have made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_magic.engine import optimizer_state
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.errors import CellFailedError

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "fused adam": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
MAKES_NONE = ("plain sgd", "dampening")


def stepped(name: str, *, ahead: bool, steps: int = 3) -> tuple[list[torch.Tensor], list[Any]]:
    """Return parameters and state after some steps; one parameter gets its gradient late."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(3)]
    optimizer = OPTIMIZERS[name](parameters)
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            # torch's own fused SGD fails where only some have their momentum yet
            late = number == 2 and step == 0 and name != "fused sgd"
            parameter.grad = None if late else torch.randn(4, 3, generator=generator)
        if ahead:
            optimizer_state.make_missing([optimizer])
            had = {id(p) for p in optimizer.state}
            # Adagrad makes its state when it is made itself
            wanted = {id(p) for p in parameters if p.grad is not None or name == "adagrad"}
            assert name in MAKES_NONE or had == wanted
            assert name != "dampening" or step > 0 or not had
        optimizer.step()
    return parameters, [optimizer.state[p] for p in parameters]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_made_ahead_is_what_the_step_makes(name):
    ours, theirs = stepped(name, ahead=True), stepped(name, ahead=False)
    for mine, reference in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(mine, reference)
    for mine, reference in zip(ours[1], theirs[1], strict=True):
        assert mine.keys() == reference.keys()
        for key, value in reference.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(mine[key], value), key


def test_state_that_cannot_be_made_is_not_half_made():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    parameters[1].grad = torch.ones(2).to_sparse()  # refused, after the first one got its state
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer_state.make_missing([optimizer])
    assert not optimizer.state


def test_an_optimizer_of_the_persons_makes_its_own():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    optimizer = Own([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer_state.make_missing([optimizer])
    assert not optimizer.state
    assert not torch_private.makes_state(optimizer)


BUILD = """
import torch
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
held = []
optimizer.register_step_pre_hook(lambda *_: held.append(len(optimizer.state)))
data = list(torch.randn(16, 4))

def full(*args):
    raise MemoryError("no room for the state")

if rank == 1:
    optimizer._init_group = full
"""
CELL = "loss = model(batch).pow(2).mean()"


def test_a_rank_without_room_for_the_state_leaves_every_ranks_weights(session):
    session.model(BUILD, show=False)
    weights = "[p.to_local().tolist() for p in model.parameters()]"
    before = session.pull(weights, rank="all")
    with pytest.raises(CellFailedError, match="no room for the state") as caught:
        session.train(CELL, data="data", show=False)
    assert not caught.value.is_torn
    assert session.pull(weights, rank="all") == before
    session.run("if rank == 1: del optimizer._init_group", show=False)
    session.train(CELL, data="data", steps=2, micro_batch_size=4, show=False)
    assert session.pull("held", rank="all") == [[4, 4]] * 2
