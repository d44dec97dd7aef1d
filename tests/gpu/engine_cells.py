"""Cells that ``run.py`` runs on engines, as text."""

from __future__ import annotations

# float32, 12.6 million parameters: large beside what a context itself takes
MEDIUM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.act(self.linear(x))

torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
"""
MEDIUM_CELL = """
x = torch.randn(32, 1024, device=device)
loss = model(x).pow(2).mean()
"""
BALLAST = """
_, total = torch.cuda.mem_get_info()
ballast = torch.empty(total // 4, dtype=torch.uint8, device=device)
torch.cuda.synchronize()
"""
"""A context and the driver's rounding are nothing beside a quarter of the card."""

# the first steps make the optimizer's state, FSDP2's buffers and the transports
SILENT_CELL = """
x, y = batch
loss = (model(x) - y).pow(2).mean()
torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")
"""

WHERE_THINGS_ARE = """{
    "parameters": sorted({p.to_local().device.type for p in model.parameters() if p.ndim}),
    "state": sorted({v.device.type for s in optimizer.state.values() for v in s.values()}),
}"""

BATCHNORM = """
import torch
import torch.nn as nn

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 3)).to(DTYPE)
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(96, 10, generator=generator, dtype=DTYPE)
targets = torch.randn(96, 3, generator=generator, dtype=DTYPE)
data = list(zip(inputs, targets))
"""

HOG = "import torch\nhog = torch.empty({size}, dtype=torch.uint8, device=device)"

# The same FSDP2 step over a plain group and over ours, in turn; then the collectives alone: on
# one rank FSDP2 leaves them out, and NCCL takes no second rank on the same card.
COMPARE_TRANSPORTS = """
import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

plain, plain_again = dist.new_group(backend="BACKEND"), dist.new_group(backend="BACKEND")
groups = {"plain": plain, "ours": dist.group.WORLD, "plain_again": plain_again}

def waited():
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

def stepper(group):
    torch.manual_seed(0)
    width = 1024 if device.type == "cuda" else 256
    net = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12)])
    net.to(device)
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(64, width, device=device)

    def step():
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

def collectives(group):
    full = torch.zeros(1 << 20, device=device)
    part = torch.zeros((1 << 20) // group.size(), device=device)

    def step():
        for _ in range(8):
            dist.all_gather_into_tensor(full, part, group=group)
            dist.reduce_scatter_tensor(part, full, group=group)
        dist.all_reduce(full, group=group)

    return step

def compared_by(make, repeat):
    steps = {name: make(group) for name, group in groups.items()}
    took = {name: [] for name in steps}
    for number in range(3 + ROUNDS):
        order = list(steps)[number % 3 :] + list(steps)[: number % 3]
        for name in order:
            begin = waited()
            for _ in range(repeat):
                steps[name]()
            took[name].append((waited() - begin) / repeat)
    medians = {name: statistics.median(values[3:]) for name, values in took.items()}
    ratios = {
        name: sorted(a / b for a, b in zip(took[name][3:], took["plain"][3:]))
        for name in ("ours", "plain_again")
    }
    return {
        "ratio": statistics.median(ratios["ours"]),
        "plain_again": statistics.median(ratios["plain_again"]),
        "plain_again_97_5": ratios["plain_again"][round(0.975 * (ROUNDS - 1))],
        "milliseconds": {name: 1000 * value for name, value in medians.items()},
    }

compared = {"step": compared_by(stepper, 5), "collectives": compared_by(collectives, 5)}
"""
