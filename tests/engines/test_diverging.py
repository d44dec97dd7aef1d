"""Ranks that do different things are told so, with their lines, and the session goes on (F20)."""

from __future__ import annotations

import pytest

from fsdp_magic.errors import CellFailedError, RanksDivergedError
from fsdp_magic.notebook.session import Session

MODEL = """
import torch
import torch.distributed as dist
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Block(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, inner), torch.nn.Linear(inner, 4)
    def forward(self, x):
        return x + self.down(self.up(x).tanh())

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(4), Block(4), Block(6)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = list(torch.randn(32, 4))
diverging = True
"""
TRAINED = "loss = model(batch).square().mean()"
OPTIONS = {"data": "data", "micro_batch_size": 2, "steps": 3, "show": False}

BRANCHES = {
    "units of equal size": ("model.layers[0](batch)", "model.layers[1](batch)"),
    "units of different size": ("model.layers[0](batch)", "model.layers[2](batch)"),
    "a unit left out": ("model.layers[2](model.layers[0](batch))", "model(batch)"),
    "through checkpointing": (
        "checkpoint(model.layers[0], batch, use_reentrant=False)",
        "checkpoint(model.layers[1], batch, use_reentrant=False)",
    ),
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_by_rank_is_reported_with_its_lines_and_rolled_back(
    session: Session, branch: str
) -> None:
    cell = f"""from torch.utils.checkpoint import checkpoint
if not diverging or step < 1:
    y = model(batch)
elif rank == 0:
    y = {BRANCHES[branch][0]}
else:
    y = {BRANCHES[branch][1]}
loss = y.square().mean()
"""
    session.model(MODEL, show=False)
    expected = session.train(TRAINED, **OPTIONS).losses
    session.model(MODEL, show=False)
    with pytest.raises(RanksDivergedError) as caught:
        session.train(cell, **OPTIONS)
    told, advice, kept = str(caught.value).splitlines()
    assert told.endswith(";")
    assert advice.startswith("every rank must run the same parts")
    assert caught.value.run.message == "the ranks diverged"
    assert told.startswith("the ranks diverged: rank 0 gathers `model.layers.")
    assert ", rank 1 gathers `model.layers." in told
    assert f"(line 5 of the cell: y = {BRANCHES[branch][0]})" in told
    assert f"(line 7 of the cell: y = {BRANCHES[branch][1]})" in told
    assert kept.startswith("Nothing is lost: the weights are those after step 1;")
    session.run("diverging = False", show=False)
    again = session.train(cell, **{**OPTIONS, "steps": 2})
    assert caught.value.run.losses + again.losses == expected


LAYER_DROP = """
import torch
from transformers import OPTConfig, OPTForCausalLM
torch.manual_seed(0)
config = OPTConfig(
    vocab_size=32, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=4, ffn_dim=16,
    num_attention_heads=2, max_position_embeddings=32, layerdrop=0.5, dropout=0.0,
)
model = OPTForCausalLM(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(16).reshape(2, 8)
"""


def test_a_library_that_drops_layers_by_rank_is_reported(session: Session) -> None:
    session.model(LAYER_DROP, show=False)
    cell = "loss = model(input_ids=ids, labels=ids).loss"
    with pytest.raises(RanksDivergedError, match=r"rank 1 \w+.* `model\.model\.decoder"):
        session.train(cell, steps=8, show=False)
    session.run("model.model.decoder.layerdrop = 0.0", show=False)
    assert session.train(cell, steps=2, show=False).state == "done"


COLLECTIVES = {
    "sizes": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(5))"),
    "dtypes": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4).int())"),
    "reductions": ("dist.all_reduce(x)", "dist.all_reduce(x, op=dist.ReduceOp.MAX)"),
    "roots": ("dist.broadcast(x, 0)", "dist.broadcast(x, 1)"),
    "calls": ("dist.barrier()", "dist.all_gather_object([None, None], 1)"),
    "order in a group of its own": (
        "dist.barrier(group=both)",
        "dist.all_reduce(x, group=both)",
    ),
}


@pytest.mark.parametrize("different", COLLECTIVES)
def test_collectives_that_differ_are_reported_before_the_transport_sees_them(
    session: Session, different: str
) -> None:
    first, second = COLLECTIVES[different]
    setup = "import torch, torch.distributed as dist\nx = torch.ones(4)\nboth = dist.new_group()"
    session.run(setup, show=False)
    with pytest.raises(RanksDivergedError) as caught:
        session.run(f"if rank == 0:\n    {first}\nelse:\n    {second}", show=False)
    assert f"(line 2 of the cell: {first})" in str(caught.value)
    assert f"(line 4 of the cell: {second})" in str(caught.value)
    outputs = session.run("dist.all_reduce(x, group=both); x[0].item()", show=False)
    assert [output.result for output in outputs] == ["2.0"] * 2


def test_what_may_differ_by_rank_raises_no_alarm(session: Session) -> None:
    code = """
import torch, torch.distributed as dist
objects = [None] * 2
dist.all_gather_object(objects, "x" * (1 + 1000 * rank))
dist.broadcast_object_list(objects if rank else [None] * 2, src=1)
dist.gather_object("y" * rank, [None] * 2 if rank == 0 else None)
dist.scatter_object_list([None], ["z", "zz"] if rank == 1 else None, src=1)
dist.all_to_all_single(torch.empty(2 + 2 * rank), torch.ones(3), [1 + rank] * 2, [1, 2])
parts = [torch.empty(2), torch.empty(2)]
dist.gather(torch.ones(2), parts if rank == 0 else None)
dist.scatter(torch.empty(2), parts if rank == 1 else None, src=1)
works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(100)]
dist.barrier()
[work.wait() for work in works]
lone = [dist.new_group([0]), dist.new_group([1])][rank]
for _ in range(rank):  # a group that one rank only is in
    dist.all_reduce(torch.ones(2), group=lone)
def refused(call, *args):
    try:
        call(*args)
    except (RuntimeError, ValueError):
        return True
if rank == 0:
    refused(dist.all_gather, [torch.empty(3)] * 2, torch.ones(2))  # before it sends anything
    dist.send(torch.ones(3), 1)
else:
    dist.recv(torch.ones(3), 0)
refused(dist.all_to_all_single, torch.empty(3), torch.ones(3), [1, 1], [2, 1])
dist.all_reduce(torch.ones(2))  # gloo's barrier would raise the refusal of the call before it again
"""
    session.run(code, show=False)


def test_what_a_person_typed_is_named_not_the_collectives_in_it(session: Session) -> None:
    session.run("import torch", show=False)
    code = "x = torch.ones(2)\nif rank == 0:\n    fsdp.mean(x)\nelse:\n    fsdp.gather(x)"
    with pytest.raises(RanksDivergedError) as caught:
        session.run(code, show=False)
    assert "rank 0 calls fsdp.mean (line 3" in str(caught.value)
    assert "rank 1 calls fsdp.gather (line 5" in str(caught.value)


NEEDS_ALL = {
    "a forward": "model(torch.ones(1, 4))",
    "a number of a shard": "model.layers[0].up.weight.sum().item()",
    "a collective": "dist.barrier()",
    "a message": "dist.recv(torch.ones(1), 0)",
    "gathering": "with fsdp.unsharded(model): pass",
}


def test_a_cell_of_one_rank_that_needs_all_is_refused_at_once(session: Session) -> None:
    session.model(MODEL, show=False)
    for code in NEEDS_ALL.values():
        with pytest.raises(CellFailedError) as caught:
            session.run(code, ranks=1, show=False, timeout=5)
        (line,) = str(caught.value).splitlines()
        assert line.startswith("rank 0 does not run this cell (--ranks), and")
        assert line.endswith("leave --ranks out")
    session.run("groups = [dist.new_group([0]), dist.new_group([1])]", show=False)
    alone = "dist.barrier(group=groups[1]); model.layers[0].up.weight.to_local().sum().item()"
    session.run(alone, ranks=1, show=False)
    assert session.train(TRAINED, **OPTIONS).state == "done"


def test_a_model_that_is_not_trained_may_be_gone_on_a_rank(session: Session) -> None:
    session.model(MODEL + "teacher = torch.nn.Linear(4, 4)\n", show=False)
    session.run("import gc\nif rank == 1: del teacher; gc.collect()", show=False)
    assert session.train(TRAINED, **OPTIONS).state == "done"


UNLIKE = {
    "if rank == 1: optimizer = torch.optim.SGD(list(model.parameters())[:10], lr=0.1)": (
        "the optimizer `optimizer` holds 12 parameters on rank 0 and holds 10 parameters on rank 1"
    ),
    "if rank == 1: model.layers[1].up.weight.requires_grad_(False)": (
        "`model.layers.1.up.weight` is trained float64 of shape (4, 4) on rank 0 and is frozen "
        "float64 of shape (4, 4) on rank 1"
    ),
    "if rank == 0: other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)": (
        "the optimizer `other` holds 1 parameters on rank 0 and is missing on rank 1"
    ),
    "other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)\n"
    "if rank == 1: held = optimizer; del optimizer; optimizer = held; del held": (
        "the optimizer `optimizer` comes first on rank 0 and the optimizer `other` on rank 1"
    ),
}


@pytest.mark.parametrize("code", UNLIKE)
def test_ranks_that_train_different_things_are_refused_before_the_first_step(
    session: Session, code: str
) -> None:
    session.model(MODEL, show=False)
    session.run(code, show=False)
    with pytest.raises(CellFailedError) as caught:
        session.train(TRAINED, **OPTIONS)
    assert str(caught.value) == (
        f"{UNLIKE[code]}; every rank must train the same, so bind the same on all"
    )
    session.model(MODEL + "other = None\n", show=False)
    assert session.train(TRAINED, **OPTIONS).state == "done"
