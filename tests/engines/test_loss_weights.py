"""The loss and gradient of the global batch do not depend on how it was cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverings import pairwise
from loops import check_equal, norm_of

from fsdp_magic.errors import CellFailedError, UsageError

STEPS, GLOBAL = 5, 16

TOKENS = """
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(12, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale

model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(2)
tokens = torch.randint(0, 11, (80, 9), generator=generator)
labels = torch.randint(0, 5, (80, 9), generator=generator)
kept = torch.rand(80, 9, generator=generator) < torch.rand(80, 1, generator=generator)
labels[~kept] = -100  # inside rows, and very unequal between them
data = [{"input_ids": t, "labels": l} for t, l in zip(tokens, labels)]
"""
MEAN = 'loss = F.cross_entropy(model(batch["input_ids"]).mT, batch["labels"])'
WEIGHTED = MEAN + '\nloss_weight = (batch["labels"] != -100).sum()'
OPTIONS = {"data": "data", "steps": STEPS}


def steps_of(names: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    for step in range(STEPS):
        rows = slice(step * GLOBAL, (step + 1) * GLOBAL)
        yield names["model"], names["tokens"][rows], names["labels"][rows]


def loop_of(loss_of: Any) -> Any:
    """Return a plain loop that trains on ``loss_of(logits, labels)``."""

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        for model, tokens, labels in steps_of(names):
            loss = loss_of(model(tokens), labels)
            names["optimizer"].zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            names["optimizer"].step()
            yield loss.item(), norm

    return loop


def over_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.mT, labels)


CUTS = [(2, 1), (2, 4), (1, 2), (4, 2)]


@pairwise(cut=CUTS, strategy=["full_shard", "shard_grad_op"], way=["loss_weight", "--loss tokens"])
def test_a_mean_over_tokens_is_that_of_one_big_batch(world, cut, strategy, way):
    engines, accumulate = cut
    cell = WEIGHTED if way == "loss_weight" else MEAN
    check_equal(
        world(engines),
        TOKENS,
        cell,
        loop_of(over_tokens),
        strategy=strategy,
        micro_batch_size=GLOBAL // (engines * accumulate),
        accumulate=accumulate,
        loss="mean" if way == "loss_weight" else "tokens",
        **OPTIONS,
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_sum_is_added_up(world, accumulate):
    summed = (
        'loss = F.cross_entropy(model(batch["input_ids"]).mT, batch["labels"], reduction="sum")'
        " / 100"
    )
    check_equal(
        world(2),
        TOKENS,
        summed,
        loop_of(lambda x, y: F.cross_entropy(x.mT, y, reduction="sum") / 100),
        micro_batch_size=8 // accumulate,
        accumulate=accumulate,
        loss="sum",
        **OPTIONS,
    )


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_weight_zero_counts_nothing_even_nan(world, kind, accumulate):
    """The mean over no token is NaN, and so are its gradients if they are taken by hand."""
    emptied = TOKENS + "labels[16 * (torch.arange(80) // 16) == torch.arange(80)] = -100\n"
    emptied += "labels[::8] = -100; labels[1::8] = -100\n"
    emptied += 'data = [{"input_ids": t, "labels": l} for t, l in zip(tokens, labels)]\n'
    weight = "int(kept.sum())" if kind == "number" else "kept.sum()"
    cell = f"""
kept = batch["labels"] != -100
each = F.cross_entropy(model(batch["input_ids"]).mT, batch["labels"], reduction="none")
loss = (each * kept).sum() / kept.sum()
loss_weight = {weight}
if kept.sum() == 0:
    assert loss.isnan()
    seen = True
"""
    session = world(2)
    session.run("seen = False", show=False)
    check_equal(
        session,
        emptied,
        cell,
        loop_of(over_tokens),
        micro_batch_size=8 // accumulate,
        accumulate=accumulate,
        **OPTIONS,
    )
    assert any(session.pull("seen", rank="all")) == (accumulate == 4)


def test_a_step_in_which_nothing_counts_has_no_gradient(world):
    session = world(2)
    session.model(TOKENS, show=False)
    before = session.pull("dict(model.named_parameters())")
    cell = 'loss = model(batch["input_ids"]).sum() * float("nan")\nloss_weight = 0'
    run = session.train(cell, steps=1, data="data", show=False)
    assert run.grad_norms == [0.0]
    after = session.pull("dict(model.named_parameters())")
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("way", ["loss_weight", "--loss tokens"])
def test_a_causal_language_model_shifts_its_labels(world, way):
    code = """
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
config = LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                     num_attention_heads=2, max_position_embeddings=16, attn_implementation="eager")
model = LlamaForCausalLM(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(2)
tokens = torch.randint(0, 31, (80, 9), generator=generator)
labels = tokens.clone()
labels[torch.rand(80, 9, generator=generator) < torch.rand(80, 1, generator=generator)] = -100
data = [{"input_ids": t, "labels": l} for t, l in zip(tokens, labels)]
"""
    # transformers computes the loss in float32, so the cell takes it from the logits
    cell = """
logits = model(input_ids=batch["input_ids"]).logits
loss = F.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:])
"""
    if way == "loss_weight":
        cell += 'loss_weight = (batch["labels"][:, 1:] != -100).sum()'

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        for model, tokens, labels in steps_of(names):
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:])
            names["optimizer"].zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            names["optimizer"].step()
            yield loss.item(), norm

    check_equal(
        world(2),
        code,
        cell,
        loop,
        micro_batch_size=4,
        accumulate=2,
        loss="mean" if way == "loss_weight" else "tokens",
        tolerance=1e-6,  # rotary embeddings are float32 in transformers
        **OPTIONS,
    )


def test_ranks_and_micro_batches_may_differ_in_size(world):
    """Ready batches of 1 to 5 samples; each rank its own."""
    ragged = (
        TOKENS
        + """
sizes = [[1, 5, 2, 4], [3, 2, 5, 1]]
starts = [0, 8]
def cut(rank):
    at, made = [0, 40][rank], []
    for size in sizes[rank]:
        made.append({"input_ids": tokens[at:at + size], "labels": labels[at:at + size]})
        at += size
    return made
mine = cut(globals().get("rank", 0))
"""
    )

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model, cut = names["model"], names["cut"]
        for step in range(2):
            together = [cut(rank)[2 * step + micro] for rank in (0, 1) for micro in (0, 1)]
            tokens = torch.cat([part["input_ids"] for part in together])
            labels = torch.cat([part["labels"] for part in together])
            each = F.cross_entropy(model(tokens).mT, labels, reduction="none")
            loss = each.mean(-1).mean()  # over samples
            names["optimizer"].zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            names["optimizer"].step()
            yield loss.item(), norm

    cell = """
each = F.cross_entropy(model(batch["input_ids"]).mT, batch["labels"], reduction="none")
loss = each.mean(-1).mean()
"""
    check_equal(
        world(2), ragged, cell, loop, data="iter(mine)", steps=2, accumulate=2, no_shuffle=False
    )


def test_metrics_are_weighed_as_the_loss(session):
    session.model(TOKENS, show=False)
    cell = (
        WEIGHTED
        + """
right = (model(batch["input_ids"]).argmax(-1) == batch["labels"]) & (batch["labels"] != -100)
metrics = {"accuracy": right.sum() / loss_weight}
if rank == 1 and micro_step == 1:
    metrics["seen"] = 3
"""
    )
    run = session.train(
        cell, data="data", steps=2, no_shuffle=True, micro_batch_size=4, accumulate=2, show=False
    )
    names: dict[str, Any] = {}
    default = torch.get_default_dtype()
    exec(TOKENS, names)
    torch.set_default_dtype(default)
    labels = names["labels"][:GLOBAL]
    right = (names["model"](names["tokens"][:GLOBAL]).argmax(-1) == labels).sum()
    assert run.metrics["accuracy"][0] == pytest.approx((right / (labels != -100).sum()).item())
    assert run.metrics["seen"] == [3.0, 3.0]


REFUSED = {
    "tokens without labels": (
        'loss = model(batch["input_ids"]).sum()',
        {"data": '[{"input_ids":t}for(t)in(tokens)]', "loss": "tokens"},
        'counts batch["labels"], and the batch has none; bind loss_weight',
    ),
    "a negative weight": (MEAN + "\nloss_weight = -1", {}, "`loss_weight` is -1; it is a number"),
    "a weight that is no number": (MEAN + "\nloss_weight = 'x'", {}, "`loss_weight` is 'x'"),
    "several weights": (
        MEAN + "\nloss_weight = torch.ones(2)",
        {},
        "`loss_weight` has shape (2,); it is one number",
    ),
    "a weight out of sight": (
        "def f():\n    global loss_weight\n    loss_weight = 3\nf()\n" + MEAN,
        {},
        "bind it in the cell itself: loss_weight = ...",
    ),
    "a weight of a sum": (WEIGHTED, {"loss": "sum"}, "--loss sum adds losses up"),
    "metrics that are no dict": (MEAN + "\nmetrics = 3", {}, "`metrics` is a int; it is a dict"),
    "a metric that is no number": (
        MEAN + "\nmetrics = {'a': 'b'}",
        {},
        "metrics['a'] is a str; it is a number",
    ),
    "a metric of several numbers": (
        MEAN + "\nmetrics = {'a': torch.ones(3)}",
        {},
        "metrics['a'] has shape (3,); it is a number or a tensor of one element",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_weighed_is_refused_in_one_line(session, wrong):
    cell, options, message = REFUSED[wrong]
    session.model(TOKENS, show=False)
    with pytest.raises((CellFailedError, UsageError)) as caught:
        session.train(cell, **{**OPTIONS, **options, "show": False})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert math.isfinite(session.train(MEAN, **OPTIONS, show=False).losses[-1])


def test_a_causal_model_that_is_no_longer_trained_shifts_nothing(session):
    """It may live on: here a variable of the person's holds it."""
    session.model(
        "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=7))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nearlier = model",
        show=False,
    )
    check_equal(
        session,
        TOKENS,
        MEAN,
        loop_of(over_tokens),
        micro_batch_size=4,
        accumulate=2,
        loss="tokens",
        **OPTIONS,
    )
