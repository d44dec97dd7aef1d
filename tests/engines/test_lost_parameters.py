"""What a person did to parameters before sharding is kept, or refused by name; never lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import check_equal, norm_of

from fsdp_magic.errors import CellFailedError

NET = """
import torch
import torch.nn as nn
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(64, 6, generator=generator)
targets = torch.randn(64, 3, generator=generator)
data = list(zip(inputs, targets))
"""
CELL = "loss = (model(batch[0]) - batch[1]).pow(2).mean()"
OPTIONS = {"data": "data", "steps": 4, "micro_batch_size": 8}


def plain(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
    model, optimizer = names["model"], names["optimizer"]
    for step in range(4):
        rows = slice(16 * step, 16 * step + 16)
        loss = (model(names["inputs"][rows]) - names["targets"][rows]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = norm_of(*model.parameters())
        optimizer.step()
        yield loss.item(), norm


LATER = {
    "a list": ("kept = list(model.parameters())", "torch.optim.SGD(kept, lr=0.1, momentum=0.9)"),
    "groups": (
        "kept = [dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=0.1), "
        "dict(params=[p for p in model.parameters() if p.ndim < 2])]",
        "torch.optim.SGD(kept, lr=0.1, momentum=0.9)",
    ),
}


@pytest.mark.parametrize("way", LATER)
def test_an_optimizer_made_later_of_earlier_parameters_trains(session, way):
    kept, made = LATER[way]
    session.model(f"{NET}{kept}", show=False)
    session.run(f"optimizer = {made}", show=False)
    run = session.train(CELL, **OPTIONS, no_shuffle=True, show=False)
    assert run.grad_norms[0] > 0
    # the same in one go, where the optimizer is there when the model is sharded
    check_equal(session, f"{NET}{kept}\noptimizer = {made}", CELL, plain, **OPTIONS)
    again = session.runs[-1]
    assert run.losses == pytest.approx(again.losses, rel=1e-12)


def test_a_list_of_earlier_parameters_is_named(session):
    sgd = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    session.model(NET + sgd + "penalised = [p for p in model.parameters()]", show=False)
    run = session.train(CELL, **OPTIONS, show=False)
    [note] = [note for note in run.notes if "from before the model was sharded" in note]
    assert note.startswith("penalised[0] and 3 more")


def test_a_persons_marks_on_parameters_are_kept(session):
    session.model(NET + "model[0].bias.no_decay = True", show=False)
    marks = "[getattr(p, 'no_decay', False) for p in model.parameters()]"
    assert session.pull(marks) == [False, True, False, False]


REFUSED = {
    "a gradient hook": (
        NET + "model[0].weight.register_hook(lambda g: g * 0)",
        "model.0.weight has a gradient hook, which its shards cannot keep",
    ),
    "max_norm": (
        "import torch\nmodel = torch.nn.Embedding(5, 4, max_norm=1.0)",
        "model has max_norm, which writes into the weight in forward",
    ),
    "sparse gradients": (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Embedding(5, 4, sparse=True))",
        "model.0 has sparse gradients",
    ),
    "a tie between models": (
        "import torch.nn as nn\nembed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)\n"
        "head.weight = embed.weight",
        "share a parameter (head.weight is embed.weight)",
    ),
    "a shared trunk": (
        "import torch.nn as nn\ntrunk = nn.Linear(4, 4)\n"
        "a, b = nn.Sequential(trunk, nn.Linear(4, 1)), nn.Sequential(trunk, nn.Linear(4, 2))\n"
        "del trunk",
        "hold both in one nn.Module and bind that alone",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_shards_cannot_keep_is_refused_in_one_line(session, what):
    code, words = REFUSED[what]
    with pytest.raises(CellFailedError) as caught:
        session.model(code, show=False)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


PENALTY = """
x = batch[0].requires_grad_()
(slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
loss = (model(x) - batch[1]).pow(2).mean() + slope.pow(2).mean()
"""


def test_gradients_of_gradients_want_whole_parameters(session):
    sgd = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    session.model(NET + sgd, show=False)
    with pytest.raises(CellFailedError, match=r"into `with fsdp.unsharded\(model\):`"):
        session.train(PENALTY, **OPTIONS, show=False)

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model, optimizer = names["model"], names["optimizer"]
        for step in range(4):
            rows = slice(16 * step, 16 * step + 16)
            x = names["inputs"][rows].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            fit = (model(x) - names["targets"][rows]).pow(2).mean()
            loss = fit + slope.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            optimizer.step()
            yield loss.item(), norm

    lines = "\n".join(f"    {line}" for line in PENALTY.strip().splitlines())
    check_equal(session, NET + sgd, f"with fsdp.unsharded(model):\n{lines}", loop, **OPTIONS)


UNLIKE = {
    "fsdp.mean(torch.ones(4 + rank, 3))": "fsdp.mean(x) takes x of one shape and type",
    "fsdp.mean(torch.ones(2) if rank else 1.0)": "fsdp.mean(x) takes x of one shape and type",
    "fsdp.gather(torch.ones(2, 3 + rank))": "fsdp.gather(x) takes tensors that differ in dim 0",
    "fsdp.gather(torch.ones(2) if rank else 'x')": "fsdp.gather(x) takes tensors that differ",
}


@pytest.mark.parametrize("call", UNLIKE)
def test_unlike_tensors_are_refused_before_they_end_the_engines(session, call):
    with pytest.raises(CellFailedError) as caught:
        session.run(f"import torch\n{call}", show=False)
    assert UNLIKE[call] in str(caught.value)
    assert len(session.status(show=False)) == 2


def test_data_made_anew_is_read_from_its_beginning_on_every_rank(session):
    """The id of a tuple that is gone is soon given to another, on one rank and not on the other."""
    session.model(NET + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", show=False)
    session.run("first = []", show=False)
    cell = "first.append(int(batch[0]))\nloss = model(inputs[batch]).pow(2).mean()"
    for _ in range(6):
        session.run(
            "data = None\nif rank == 0: other = [tuple(range(64)) for _ in range(3)]\n"
            "data = tuple(range(64))",
            show=False,
        )
        session.train(cell, data="data", steps=1, no_shuffle=True, show=False)
    assert session.pull("first", rank="all") == [[0] * 6, [8] * 6]


def test_a_model_around_a_sharded_one_is_refused_with_the_reason(session):
    session.model("import torch.nn as nn\nencoder = nn.Linear(4, 4)", show=False)
    with pytest.raises(CellFailedError, match="model holds encoder, which is sharded already"):
        session.model("model = nn.Sequential(encoder, nn.Linear(4, 2))", show=False)
