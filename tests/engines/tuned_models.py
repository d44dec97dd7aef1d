"""Models, and cells, whose steps fill a rank of 128 MiB at some ten to a hundred samples."""

from __future__ import annotations

_HEAD = """
import random, numpy, torch
from torch import nn
torch.manual_seed(1)

class Samples(torch.utils.data.Dataset):
    def __init__(self, make, count): self.make, self.count = make, count
    def __len__(self): return self.count
    def __getitem__(self, i): return self.make(torch.Generator().manual_seed(i))
"""

MLP = f"""{_HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x * self.scale

model = Net()
data = Samples(lambda g: torch.randn(512, 64, generator=g), 1200)
"""
MLP_CELL = "loss = (model(batch) - 0.5 * batch).square().mean()"

CNN = f"""{_HEAD}
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10),
)
data = Samples(lambda g: (torch.randn(3, 96, 96, generator=g), 3), 1200)
"""
CNN_CELL = "loss = nn.functional.cross_entropy(model(batch[0]), batch[1])"

GPT2 = f"""{_HEAD}
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=3000, n_positions=128, n_embd=64, n_layer=2, n_head=4, use_cache=False,
))
def row(g):
    ids = torch.randint(0, 3000, (128,), generator=g)
    return {{"input_ids": ids, "labels": ids}}
data = Samples(row, 1200)
"""
GPT2_CELL = "loss = model(**batch).loss"

SGD = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
"""
ADAMW = """
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}], lr=1e-3
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
del decayed, others
"""

QUICK = f"""{_HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        x = self.drop(self.norm(self.first(x)))
        wide = x.repeat(1, 4096)  # a mebibyte
        for _ in range(3):
            wide = torch.tanh(wide)
        return self.last(x) + wide.mean(1, keepdim=True)

model = Net()
data = Samples(lambda g: torch.randn(64, generator=g), 400)
"""
QUICK_CELL = "loss = model(batch).square().mean()"
