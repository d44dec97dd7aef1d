"""Kinds of training programs that people bring, each equal to its plain loop.

Others stand with what they show: a language model with accumulation in ``test_equality``, losses
weighted by tokens in ``test_loss_weights``, a contrastive loss in ``test_fsdp_in_cells``, a VAE and
an actor-critic's methods in ``test_methods``, experts that idle in ``test_sharding``, LoRA in
``test_lora``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import check_equal, in_one_process, norm_of

STRATEGIES = ("full_shard", "shard_grad_op")
EACH = pytest.mark.parametrize("strategy", STRATEGIES)
START = """
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
generator = torch.Generator().manual_seed(2)

def mlp(*sizes):
    body = [nn.Sequential(nn.Linear(sizes[1], sizes[1]), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), *body, nn.Linear(sizes[1], sizes[2]))
"""
GLOBAL, STEPS = 16, 4
OPTIONS = {"data": "data", "steps": STEPS, "micro_batch_size": 8}


def rows_of(step: int) -> slice:
    return slice(GLOBAL * step, GLOBAL * (step + 1))


CLASSIFY = (
    START
    + """
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=24, max_position_embeddings=12, num_labels=3,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                    attn_implementation="eager")
model = BertForSequenceClassification(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
tokens = torch.randint(0, 31, (77, 9), generator=generator)
mask = (torch.arange(9) < torch.randint(3, 10, (77, 1), generator=generator)).long()
labels = torch.randint(0, 3, (77,), generator=generator)
data = [{"input_ids": t, "attention_mask": m, "labels": l} for t, m, l in zip(tokens, mask, labels)]
validation = data[64:]
data = data[:64]
"""
)


@EACH
def test_sequence_classification_with_evaluation(session, strategy):
    cell = """
logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
loss = F.cross_entropy(logits, batch["labels"])
"""
    evaluated: list[tuple[float, float, list[int]]] = []

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model, optimizer = names["model"], names["optimizer"]

        def logits_of(rows: slice) -> torch.Tensor:
            return model(input_ids=names["tokens"][rows], attention_mask=names["mask"][rows]).logits

        for step in range(STEPS):
            rows = rows_of(step)
            loss = F.cross_entropy(logits_of(rows), names["labels"][rows])
            optimizer.zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            optimizer.step()
            yield loss.item(), norm
        with torch.no_grad():
            logits = logits_of(slice(64, 77))
        right = (logits.argmax(-1) == names["labels"][64:]).double().mean()
        loss = F.cross_entropy(logits, names["labels"][64:])
        evaluated.append((loss.item(), right.item(), logits.argmax(-1).tolist()))

    # attention masks are float32 in transformers
    check_equal(session, CLASSIFY, cell, loop, strategy=strategy, tolerance=1e-6, **OPTIONS)
    evaluation = session.eval(
        cell + 'metrics = {"accuracy": (logits.argmax(-1) == batch["labels"]).double().mean()}\n'
        'collect = {"prediction": logits.argmax(-1)}',
        data="validation",
        micro_batch_size=3,
        show=False,
    )
    loss, accuracy, predictions = evaluated[0]
    assert evaluation.samples == 13
    assert evaluation.loss == pytest.approx(loss, rel=1e-6)
    assert evaluation.metrics == {"accuracy": pytest.approx(accuracy)}
    assert np.asarray(evaluation.collected["prediction"]).tolist() == predictions


DISTIL = (
    START
    + """
teacher, model = mlp(6, 12, 4), mlp(6, 8, 4)
teacher.requires_grad_(False).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn(64, 6, generator=generator)
labels = torch.randint(0, 4, (64,), generator=generator)
data = list(zip(inputs, labels))
"""
)


@EACH
@pytest.mark.parametrize("guided", ["under no_grad", "detached"])
def test_distillation(session, strategy, guided):
    taught = "teacher(x).detach()" if guided == "detached" else "guide(x)"
    cell = f"""
def guide(x):
    with torch.no_grad():
        return teacher(x)
x, y = batch
out = model(x)
soft = F.kl_div(out.log_softmax(-1), {taught}.softmax(-1), reduction="batchmean")
loss = 0.5 * F.cross_entropy(out, y) + 0.5 * soft
"""

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model, teacher = names["model"], names["teacher"]
        for step in range(STEPS):
            x, y = names["inputs"][rows_of(step)], names["labels"][rows_of(step)]
            out = model(x)
            soft = F.kl_div(
                out.log_softmax(-1), teacher(x).detach().softmax(-1), reduction="batchmean"
            )
            loss = 0.5 * F.cross_entropy(out, y) + 0.5 * soft
            names["optimizer"].zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            names["optimizer"].step()
            yield loss.item(), norm

    check_equal(session, DISTIL, cell, loop, strategy=strategy, **OPTIONS)
    assert session.pull("teacher.training, model.training") == (False, True)


GAN = (
    START
    + """
nets = {"G": mlp(3, 8, 5), "D": mlp(5, 8, 1)}
G, D = nets["G"], nets["D"]
optimizer_g = torch.optim.SGD(G.parameters(), lr=0.1, momentum=0.9)
optimizer_d = torch.optim.SGD(D.parameters(), lr=0.1, momentum=0.9)
real = torch.randn(64, 5, generator=generator) + 1
noise = torch.randn(64, 3, generator=generator)
data = list(zip(real, noise))
def bce(out, one):
    return F.binary_cross_entropy_with_logits(out, torch.full_like(out, float(one)))
"""
)


@EACH
@pytest.mark.parametrize("cleared", ["by the optimizer", "by the module"])
def test_a_gan_that_clears_gradients_between_forward_and_backward(session, strategy, cleared):
    clear_d, clear_g = (
        ("optimizer_d.zero_grad()", "optimizer_g.zero_grad()")
        if cleared == "by the optimizer"
        else ("D.zero_grad()", "G.zero_grad()")
    )
    cell = f"""
real, noise = batch
fake = G(noise)
loss_d = bce(D(real), 1) + bce(D(fake.detach()), 0)
{clear_d}
loss_d.backward()
optimizer_d.step()
loss_g = bce(D(fake), 1)
{clear_g}
loss_g.backward()
optimizer_g.step()
loss = loss_g
metrics = {{"loss_d": loss_d}}
"""
    losses_d: list[float] = []

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        G, D, bce = names["G"], names["D"], names["bce"]
        for step in range(STEPS):
            fake = G(names["noise"][rows_of(step)])
            loss_d = bce(D(names["real"][rows_of(step)]), 1) + bce(D(fake.detach()), 0)
            names["optimizer_d"].zero_grad()
            loss_d.backward()
            squares = norm_of(*D.parameters()) ** 2
            names["optimizer_d"].step()
            loss = bce(D(fake), 1)
            names["optimizer_g"].zero_grad()
            loss.backward()
            squares += norm_of(*G.parameters()) ** 2
            names["optimizer_g"].step()
            losses_d.append(loss_d.item())
            yield loss.item(), squares**0.5

    run = check_equal(
        session, GAN, cell, loop, strategy=strategy, models=("G", "D"), manual=True, **OPTIONS
    )
    assert run.metrics["loss_d"] == pytest.approx(losses_d, rel=1e-9)


EMA = (
    START
    + """
import copy
model = mlp(6, 8, 3)
target = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn(64, 6, generator=generator)
labels = torch.randint(0, 3, (64,), generator=generator)
data = list(zip(inputs, labels))

@torch.no_grad()
def follow():
    for p, t in zip(model.parameters(), target.parameters()):
        t.lerp_(p, 0.3)
"""
)


@EACH
@pytest.mark.parametrize("judged", ["under no_grad", "detached"])
def test_a_moving_average_that_is_evaluated_updated_and_evaluated_again(session, strategy, judged):
    quiet = "torch.no_grad()" if judged == "under no_grad" else "torch.enable_grad()"
    cell = f"""
x, y = batch
with {quiet}:
    wanted = target(x).detach()
out = model(x)
loss = F.cross_entropy(out, y) + (out - wanted).pow(2).mean()
"""

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model, target = names["model"], names["target"]
        for step in range(STEPS):
            x, y = names["inputs"][rows_of(step)], names["labels"][rows_of(step)]
            out = model(x)
            loss = F.cross_entropy(out, y) + (out - target(x).detach()).pow(2).mean()
            names["optimizer"].zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            names["optimizer"].step()
            names["follow"]()
            yield loss.item(), norm

    check_equal(
        session,
        EMA,
        cell,
        loop,
        strategy=strategy,
        models=("model", "target"),
        after_step="follow",
        **OPTIONS,
    )


DPO = (
    START
    + """
import copy
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=23, n_positions=10,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
                    eos_token_id=0, attn_implementation="eager")
model = GPT2LMHeadModel(config)
reference = copy.deepcopy(model).requires_grad_(False).eval()
with torch.no_grad():
    for p in reference.parameters():
        p.add_(0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
chosen = torch.randint(0, 23, (64, 8), generator=generator)
rejected = torch.randint(0, 23, (64, 8), generator=generator)
data = [{"chosen": c, "rejected": r} for c, r in zip(chosen, rejected)]

def log_probability(net, tokens):
    logits = net(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)

def dpo(chosen, rejected):
    with torch.no_grad():
        before = log_probability(reference, chosen) - log_probability(reference, rejected)
    now = log_probability(model, chosen) - log_probability(model, rejected)
    return -F.logsigmoid(0.1 * (now - before)).mean()
"""
)


@EACH
def test_preferences_against_a_reference_model(session, strategy):
    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model = names["model"]
        for step in range(STEPS):
            loss = names["dpo"](names["chosen"][rows_of(step)], names["rejected"][rows_of(step)])
            names["optimizer"].zero_grad()
            loss.backward()
            norm = norm_of(*model.parameters())
            names["optimizer"].step()
            yield loss.item(), norm

    cell = 'loss = dpo(batch["chosen"], batch["rejected"])'
    check_equal(session, DPO, cell, loop, strategy=strategy, accumulate=1, **OPTIONS)


PPO = (
    START
    + """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(6, 8, 4), mlp(6, 8, 1)

    def get_value(self, x):
        return self.critic(x).squeeze(-1)

    def get_log_probability(self, x, action):
        return self.actor(x).log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)

model = agent = Agent()
optimizer = torch.optim.SGD(agent.parameters(), lr=0.1, momentum=0.9)
states = torch.randn(64, 6, generator=generator)
actions = torch.randint(0, 4, (64,), generator=generator)
returns = torch.randn(64, generator=generator)
data = list(zip(states, actions, returns))

def surrogate(x, action, wanted, before, advantage):
    ratio = (agent.get_log_probability(x, action) - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return -gain + 0.5 * (agent.get_value(x) - wanted).pow(2).mean()
"""
)


@EACH
def test_several_epochs_over_each_rollout(session, strategy):
    cell = """
x, action, wanted = batch
with torch.no_grad():
    before, advantage = agent.get_log_probability(x, action), wanted - agent.get_value(x)
for inner in range(3):
    loss = surrogate(x, action, wanted, before, advantage)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        agent = names["agent"]
        for step in range(STEPS):
            x, action = names["states"][rows_of(step)], names["actions"][rows_of(step)]
            wanted = names["returns"][rows_of(step)]
            with torch.no_grad():
                before = agent.get_log_probability(x, action)
                advantage = wanted - agent.get_value(x)
            for _ in range(3):
                loss = names["surrogate"](x, action, wanted, before, advantage)
                names["optimizer"].zero_grad()
                loss.backward()
                norm = norm_of(*agent.parameters())
                names["optimizer"].step()
            yield loss.item(), norm

    check_equal(session, PPO, cell, loop, strategy=strategy, manual=True, **OPTIONS)


LBFGS = (
    START
    + """
model = mlp(6, 8, 3)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=SEARCH)
inputs = torch.randn(64, 6, generator=generator)
targets = torch.randn(64, 3, generator=generator)
data = list(zip(inputs, targets))
"""
)


@EACH
@pytest.mark.parametrize("search", ["None", "'strong_wolfe'"])
def test_lbfgs_with_a_closure(session, strategy, search):
    code = LBFGS.replace("SEARCH", search)
    cell = """
def closure():
    optimizer.zero_grad()
    value = F.mse_loss(model(batch[0]), batch[1])
    value.backward()
    return value
loss = optimizer.step(closure)
"""

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        model, optimizer = names["model"], names["optimizer"]
        for step in range(STEPS):
            x, y = names["inputs"][rows_of(step)], names["targets"][rows_of(step)]

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            yield optimizer.step(closure).item(), 0.0

    # curvature is a quotient of small differences, which rounding is divided by too
    check_equal(
        session, code, cell, loop, strategy=strategy, manual=True, norms=False, tolerance=1e-6,
        **OPTIONS,
    )  # fmt: skip


def test_the_reference_itself_depends_on_its_data():
    """A loop that ignored its batches would make every comparison above worthless."""

    def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
        for step in range(STEPS):
            loss = F.cross_entropy(
                names["model"](names["inputs"][rows_of(step)]), names["labels"][rows_of(step)]
            )
            yield loss.item(), 0.0

    losses, *_ = in_one_process(DISTIL, loop)
    assert len(set(losses)) == STEPS
