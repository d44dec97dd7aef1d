"""Run on the engines by the chaos suite: the faults, and the program that they strike.

Executed in the engines' namespace, not imported: what is here finds ``rank``, ``step`` and
``micro_step`` as a cell does. A fault strikes once: its file is there until it has.
"""

import mmap
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_magic.engine import gradients as _gradients

case = {"place": None}
RANK, ENGINE = int(os.environ["RANK"]), os.getpid()
SAMPLES = 16


class OwnBaseError(BaseException):
    """Something that ``except Exception`` does not catch."""


def arm(**values):
    """Say which fault is to strike where; every rank gets the same."""
    case.clear()
    case.update(values)
    if values["rank"] in (None, RANK):
        _file("armed").touch()
    item_count[:8] = (0).to_bytes(8, "little")


def _file(name):
    return Path(case["directory"], f"{name}-{RANK}")


def fault(place):
    """Strike if this is the place and the moment."""
    if case["place"] != place or case["rank"] not in (None, RANK):
        return
    names = globals()
    if case["step"] is not None and names.get("step") != case["step"]:
        return
    if case["micro_step"] is not None and names.get("micro_step") != case["micro_step"]:
        return
    try:
        _file("armed").unlink()
    except FileNotFoundError:
        return  # it has struck
    _file("struck").write_text(repr(time.monotonic()))
    FAULTS[case["fault"]](case["how"])


def _raise(how):
    kinds = {"OwnBaseError": OwnBaseError, "SystemExit": SystemExit, "KeyError": KeyError}
    kinds |= {"ValueError": ValueError, "RuntimeError": RuntimeError}
    raise kinds[how]("chaos")


def _fill_memory(how):
    held = []
    while True:
        size = 1 << (50 if how == "too much at once" else 24)
        held.append(torch.ones(size, dtype=torch.uint8))


def _press(how):
    os.kill(case["kernel"], signal.SIGINT)


def _hang(how):
    if how == "sleep":
        time.sleep(60)
    elif how == "loop":
        while True:
            pass
    elif how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=60)
    else:
        dist.recv(torch.ones(1), (RANK + 1) % dist.get_world_size())


def _interrupt_itself(how):
    os.kill(os.getpid(), signal.SIGINT)


def _pause(how):
    waker = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def _kill(how):
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_engine(how):
    os.kill(ENGINE, signal.SIGKILL)  # perhaps from a worker of its DataLoader


def _kill_helper(how):
    os.kill(case["helper"], signal.SIGKILL)


FAULTS = {
    "exception": _raise,
    "out of memory": _fill_memory,
    "interrupt": _press,
    "interrupt at any moment": lambda how: None,  # it comes from the kernel
    "exception, then interrupt": _raise,
    "stuck, interrupted twice": _hang,
    "stuck, timed out": _hang,
    "engine interrupted": _interrupt_itself,
    "paused": _pause,
    "worker killed": _kill,
    "engine killed": _kill_engine,
    "controller killed": _kill_helper,
    "fork server killed": _kill_helper,
}

# ---------------------------------------------------------------- the program

item_count = mmap.mmap(-1, 8)
"""How many samples this rank has read; its DataLoader's workers count on."""


class Samples(torch.utils.data.Dataset):
    """A few samples."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randn(count, 3, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        count = int.from_bytes(item_count[:8], "little")
        item_count[:8] = (count + 1).to_bytes(8, "little")
        if count >= case.get("item", 1 << 60):
            fault("data")
        return self.x[index], self.y[index]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        fault("backward")
        return gradient


class Place(nn.Module):
    """Where forward and backward can fail, between two units."""

    def forward(self, x):
        if torch.is_grad_enabled() and x.requires_grad:
            fault("forward")
            return _Backward.apply(x)
        return x


class Block(nn.Module):
    """A unit of the model."""

    def __init__(self, layer):
        super().__init__()
        kinds = {"dropout": nn.Dropout(0.3), "batchnorm": nn.BatchNorm1d(6)}
        self.inside = nn.Sequential(nn.Linear(6, 6), kinds.get(layer, nn.Tanh()), nn.Tanh())
        self.checkpointed = layer == "checkpointed"

    def forward(self, x):
        if self.checkpointed and torch.is_grad_enabled():
            return x + checkpoint(self.inside, x, use_reentrant=False)
        return x + self.inside(x)


class Net(nn.Module):
    """Two units with a place to fail between them."""

    def __init__(self, layer):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block(layer), Block(layer)])
        self.place = Place()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        return self.last(self.blocks[1](self.place(x)))


def loss_of(net, batch):
    """Return the loss of a micro-batch; every random generator has its part in it."""
    x, y = batch
    if torch.is_grad_enabled():
        fault("micro-step")
        x = x + 0.01 * torch.randn_like(x) + 0.01 * random.random()
    else:
        fault("evaluation")
        fault("eval")
    loss = (net(x) - y).square().mean()
    if torch.is_grad_enabled():
        fault("loss")
    return loss


def after(values):
    """Be called after each step."""
    fault("after step")


if not hasattr(_gradients, "_measure_without_chaos"):
    _gradients._measure_without_chaos = _gradients.measure

    def _measure(*args, **kwargs):
        fault("gradient norm")
        return _gradients._measure_without_chaos(*args, **kwargs)

    _gradients.measure = _measure
