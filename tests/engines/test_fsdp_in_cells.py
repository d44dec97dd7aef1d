"""What a person can ask of ``fsdp`` in a cell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import check_equal, norm_of

from fsdp_magic.errors import CellFailedError

PAIRS = """
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(2)
left = torch.randn(64, 6, generator=generator)
right = left + 0.3 * torch.randn(64, 6, generator=generator)
data = list(zip(left, right))
"""


def contrastive(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Each left one must find its right one among all of the global batch."""
    model = names["model"]
    for step in range(4):
        rows = slice(16 * step, 16 * step + 16)
        a, b = model(names["left"][rows]), model(names["right"][rows])
        loss = F.cross_entropy(a @ b.T, torch.arange(16))
        names["optimizer"].zero_grad()
        loss.backward()
        norm = norm_of(*model.parameters())
        names["optimizer"].step()
        yield loss.item(), norm


@pytest.mark.parametrize("engines", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_contrastive_loss_over_all_ranks_equals_one_process(world, engines, strategy):
    cell = """
a, b = model(batch[0]), model(batch[1])
everyone = fsdp.gather(b)
first = rank * len(a)
loss = F.cross_entropy(a @ everyone.T, torch.arange(first, first + len(a)))
"""
    check_equal(
        world(engines),
        PAIRS,
        cell,
        contrastive,
        strategy=strategy,
        data="data",
        steps=4,
        micro_batch_size=16 // engines,
    )


def test_gradients_flow_through_a_mean_over_the_ranks(session):
    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model = names["model"]
        for step in range(4):
            out = model(names["left"][16 * step : 16 * step + 16])
            loss = (out - out.mean(0)).pow(2).mean()
            names["optimizer"].zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            names["optimizer"].step()
            yield loss.item(), norm

    cell = "out = model(batch[0])\nloss = (out - fsdp.mean(out.mean(0))).pow(2).mean()"
    check_equal(session, PAIRS, cell, loop, data="data", steps=4, micro_batch_size=8)


def test_numbers_tensors_and_objects_are_brought_together(session):
    code = """
import torch
ragged = fsdp.gather(torch.arange(rank + 1) + 10 * rank).tolist()
one = fsdp.gather(torch.tensor(float(rank))).tolist()
things = fsdp.gather({"rank": rank})
means = fsdp.mean(rank), fsdp.mean(torch.tensor([rank, 1])).tolist()
none = fsdp.gather(torch.zeros(0 if rank else 2, 3)).shape
"""
    session.run(code, show=False)
    for name, value in {
        "ragged": [0, 10, 11],
        "one": [0.0, 1.0],
        "things": [{"rank": 0}, {"rank": 1}],
        "means": (0.5, [0.5, 1.0]),
        "none": torch.Size([2, 3]),
    }.items():
        assert session.pull(name, rank="all") == [value, value]


def test_a_sharded_tensor_is_made_whole(session):
    session.model(PAIRS, show=False)
    whole = session.pull("model[0].weight")
    session.run("w = fsdp.whole(model[0].weight); same = fsdp.whole(3)", show=False)
    assert torch.equal(session.pull("w"), whole)
    assert session.pull("type(w).__name__, w.requires_grad, same") == ("Tensor", False, 3)


def test_a_gradient_is_made_whole(session):
    """``p.grad.norm()`` in a cell would be this rank's part."""
    session.model(PAIRS, show=False)
    cell = """
optimizer.zero_grad()
model(batch[0]).pow(2).mean().backward()
norm = torch.stack([fsdp.whole(p.grad).norm() for p in model.parameters()]).norm().item()
optimizer.step()
"""
    run = session.train(cell, data="data", manual=True, steps=1, show=False)
    assert session.pull("norm", rank="all") == pytest.approx([run.grad_norms[0]] * 2, rel=1e-12)


def test_stop_outside_a_run_is_refused(session):
    with pytest.raises(CellFailedError, match="ends a training run after its step"):
        session.run("fsdp.stop()", show=False)
    session.run("1", show=False)


def test_whole_weights_can_be_saved_by_one_rank(session, tmp_path):
    """The recipe of the README."""
    session.model("import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(5, 3))", show=False)
    session.run(
        f"""
whole = {{name: fsdp.whole(value) for name, value in model.state_dict().items()}}
if rank == 0:
    torch.save(whole, {str(tmp_path / "model.pt")!r})
""",
        show=False,
    )
    saved = torch.load(tmp_path / "model.pt")
    assert {name: tuple(value.shape) for name, value in saved.items()} == {
        "0.weight": (3, 5),
        "0.bias": (3,),
    }
    assert torch.equal(saved["0.weight"], session.pull("model[0].weight"))
