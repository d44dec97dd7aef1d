"""Models of every kind that strategies are shown on: code, data and a cell, and the plain loop.

The loop knows nothing of the package: it runs the same cell in this process on the whole global
batch, or, for a model that normalises over its batch, on the parts that ranks would get.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from equality import GLOBAL_BATCH, STEPS, Trajectory
from torch.utils.data import default_collate

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
generator = torch.Generator().manual_seed(2)
"""
TOKENS = "data = list(torch.randint(0, 53, (96, 12), generator=generator))\n"

GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(
    n_layer=2, n_head=2, n_embd=32, vocab_size=53, n_positions=16,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
))
"""
# its own norm computes in float32, whatever the weights are
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=53, max_position_embeddings=16, tie_word_embeddings=False,
))
for layer in model.model.layers:
    layer.input_layernorm = nn.RMSNorm(32, eps=1e-6)
    layer.post_attention_layernorm = nn.RMSNorm(32, eps=1e-6)
model.model.norm = nn.RMSNorm(32, eps=1e-6)
"""
BERT = """
from transformers import BertConfig, BertForMaskedLM
model = BertForMaskedLM(BertConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    vocab_size=53, max_position_embeddings=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
))
"""
# transformers computes a loss in float32, so the cells take theirs from the logits
CAUSAL_CELL = """
logits = model(input_ids=batch).logits
loss = F.cross_entropy(logits[:, :-1].reshape(-1, 53), batch[:, 1:].reshape(-1))
"""
MASKED_CELL = """
logits = model(input_ids=torch.where(batch % 5 == 0, 1, batch)).logits
loss = F.cross_entropy(logits.reshape(-1, 53), batch.reshape(-1))
"""
CNN = """
class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        return self.last(self.blocks(self.stem(x)).mean((2, 3)))

model = Net()
images = torch.randn(96, 3, 9, 9, generator=generator).double()
data = list(zip(images, torch.randint(0, 5, (96,), generator=generator)))
"""
CNN_CELL = """
images_, labels = batch
loss = F.cross_entropy(model(images_), labels)
"""
HEADS = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(
            [nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.LayerNorm(12)) for _ in range(2)]
        )
        self.classes = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))
        self.value = nn.Linear(12, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))  # a scalar, which cannot be cut

    def forward(self, x):
        for part in self.body:
            x = x + part(x)
        return self.classes(x), self.value(x).squeeze(-1) * self.scale

model = Heads()
inputs = torch.randn(96, 12, generator=generator).double()
labels_ = torch.randint(0, 4, (96,), generator=generator)
data = list(zip(inputs, labels_, inputs.sum(1)))
"""
HEADS_CELL = """
x, labels, target = batch
scores, value = model(x)
loss = F.cross_entropy(scores, labels) + 0.5 * (value - target).pow(2).mean()
"""
SGD = """
model = model.double().train()
matrices = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.SGD(
    [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.05}],
    lr=0.1, momentum=0.9,
)
"""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model with its data and cell.

    Attributes:
        code: builds ``model``, ``optimizer`` and ``data``.
        cell: a training cell.
        normalises: whether a sample's output depends on the others of its micro-batch.
        block: the class of its repeated part.
    """

    code: str
    cell: str
    block: str
    normalises: bool = False


ARCHITECTURES = {
    "gpt2": Architecture(code=HEAD + GPT2 + TOKENS + SGD, cell=CAUSAL_CELL, block="GPT2Block"),
    "llama": Architecture(
        code=HEAD + LLAMA + TOKENS + SGD, cell=CAUSAL_CELL, block="LlamaDecoderLayer"
    ),
    "bert": Architecture(code=HEAD + BERT + TOKENS + SGD, cell=MASKED_CELL, block="BertLayer"),
    "cnn": Architecture(code=HEAD + CNN + SGD, cell=CNN_CELL, block="Block", normalises=True),
    "heads": Architecture(code=HEAD + HEADS + SGD, cell=HEADS_CELL, block="Sequential"),
}


def in_one_process(architecture: Architecture, *, parts: int) -> Trajectory:
    """Train in this process with a plain loop.

    Args:
        architecture: what is trained.
        parts: into how many micro-batches ranks and accumulation cut a step; matters only to
            a model that normalises over them.
    """
    names: dict[str, Any] = {}
    exec(architecture.code, names)
    model, optimizer, data = names["model"], names["optimizer"], names["data"]
    trajectory = Trajectory(before=_weights(model))
    size = GLOBAL_BATCH // (parts if architecture.normalises else 1)
    for step in range(STEPS):
        samples = data[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, GLOBAL_BATCH, size):
            names["batch"] = default_collate(samples[start : start + size])
            exec(architecture.cell, names)
            loss = names["loss"] * size / GLOBAL_BATCH
            loss.backward()
            total += loss.item()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        trajectory.grad_norms.append(float(torch.sqrt(sum(g.pow(2).sum() for g in gradients))))
        optimizer.step()
        trajectory.losses.append(total)
    trajectory.after = _weights(model)
    return trajectory


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
