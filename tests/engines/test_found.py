"""What is found and sharded: in containers, attributes and wrappers, by dotted name, once."""

from __future__ import annotations

import pytest
import torch

from fsdp_magic.errors import FsdpError

NET = """
import torch
import torch.nn as nn

def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

data = [(torch.randn(4), torch.randn(2)) for _ in range(32)]
"""


def cell(model: str) -> str:
    return f"x, y = batch\nloss = ({model}(x) - y).pow(2).mean()"


OPTIONS = {"data": "data", "steps": 2, "micro_batch_size": 4, "show": False}
BOUND = {
    "an object": ("trainer = Trainer(net())", ["trainer.model"]),
    "a dict": (
        "nets = {'G': net(), 'D': net()}\n"
        "optimizer = torch.optim.SGD([*nets['G'].parameters(), *nets['D'].parameters()], lr=0.1)",
        ["nets['G']", "nets['D']"],
    ),
    "a list": (
        "nets = [net(), net()]\noptimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)",
        ["nets[0]", "nets[1]"],
    ),
    "a wrapper": (
        "inner = net()\nmodel = Wrapper(inner)\n"
        "optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)",
        ["model"],
    ),
    "twice": (
        "first = net()\nsecond = first\nkept = {'again': first}\n"
        "optimizer = torch.optim.SGD(first.parameters(), lr=0.1)",
        ["first"],
    ),
}


@pytest.mark.parametrize("where", BOUND)
def test_a_model_is_found_where_it_is_bound(session, where):
    code, names = BOUND[where]
    session.model(NET + code, show=False)
    assert set(session.status(show=False)[0].models) == set(names)
    before = session.pull(f"next({names[0]}.parameters())")
    session.train(cell(names[0]), **OPTIONS)
    assert not torch.equal(session.pull(f"next({names[0]}.parameters())"), before)


def test_dotted_names_choose_what_is_sharded(session):
    code = NET + "trainer = Trainer(net())\nnets = {'G': net(), 'D': net()}\nsame = id(nets['G'])"
    session.model(code, ("trainer.model", 'nets["G"]'), show=False)
    kinds = "[type(m).__name__ for m in (trainer.model, nets['G'], nets['D'])]"
    assert session.pull(kinds) == ["FSDPSequential", "FSDPSequential", "Sequential"]
    assert session.pull("id(nets['G']) == same and isinstance(trainer.model, nn.Sequential)")


@pytest.mark.parametrize("wrapped", ["nn.DataParallel(net())", "Wrapper(nn.DataParallel(net()))"])
def test_data_parallel_is_refused_with_what_to_type(session, wrapped):
    with pytest.raises(
        FsdpError, match=r"DataParallel.*bind the module in it: model.* = model"
    ) as e:
        session.model(f"{NET}model = {wrapped}", show=False)
    assert len(str(e.value).splitlines()) == 1


def test_parameters_of_no_module_are_rank_0_s_and_train_together(session):
    code = NET + (
        "model = net()\n"
        "torch.manual_seed(rank)\n"
        "free = nn.Parameter(torch.randn(2))\n"
        "leaf = torch.randn(2, requires_grad=True)\n"
        "mine = free.detach().clone()\n"
        "optimizer = torch.optim.SGD([*model.parameters(), free, leaf], lr=0.1)\n"
    )
    session.model(code, show=False)
    mine = session.pull("mine", rank="all")
    assert not torch.equal(*mine)
    first = "x, y = batch\nstart = free.detach().clone()\n"
    run = session.train(
        first + "loss = (model(x) + free * leaf - y).pow(2).mean()", **OPTIONS | {"steps": 1}
    )
    assert any("differed between ranks" in note for note in run.notes)
    assert not any("no model and no variable" in note for note in run.notes)
    assert torch.equal(session.pull("start", rank=1), mine[0])
    assert torch.equal(*session.pull("free", rank="all"))
    assert torch.equal(*session.pull("leaf", rank="all"))
    run = session.train(cell("model"), **OPTIONS)
    assert not any("differed between ranks" in note for note in run.notes)
