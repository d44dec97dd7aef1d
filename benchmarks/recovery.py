"""How long it takes from a failure to a prompt that works again, on two engines.

A rank raises in the forward or in the backward of a training step while its peer waits in a
collective. The clock, which all processes of a machine share, runs from the moment of the raise
until the error is there, and until the next cell has run an all_reduce on both ranks. Beside it
the same failure of the same model in plain ``%%px``, which hangs: interrupted after ten seconds,
and asked again. Then an engine that is killed, until fresh ones have run an all_reduce; and a
rank in an endless loop, from the interrupt to the prompt.

    python benchmarks/recovery.py [--rounds 50]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from typing import Any

from side_by_side import RANKS, Kernel, machine, say, summary

BOUND = 0.3
_HANG_SECONDS = 10.0
_DEATHS = 10
_WARM_UP = 2
_PLACES = ("forward", "backward")

NET = """
import time
import torch
import torch.distributed as dist
from torch import nn

fails = None  # the place

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if fails == "backward" and rank == 1:
            raise ValueError(repr(time.monotonic()))
        return gradient

class Place(nn.Module):
    def forward(self, x):
        if fails == "forward" and rank == 1:
            raise ValueError(repr(time.monotonic()))
        return Backward.apply(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.place = Place()

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(self.place(x) if number == 2 else x)
        return x
"""
MODEL = "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)"
LOSS = "loss = model(torch.ones(8, 64)).square().mean()"
USABLE = "x = torch.ones(1); dist.all_reduce(x); x.item()"

SETUP = f"""
%load_ext fsdp_magic
import fsdp_magic, json, recovery
session = fsdp_magic.init(n={RANKS}, device="cpu", show=False)
"""
MEASURE = "print(json.dumps(recovery.in_kernel(session, rounds={rounds})))"

PLAIN_SETUP = f"""
import ipyparallel, tempfile
directory = tempfile.mkdtemp()
cluster = ipyparallel.Cluster(n={RANKS}, log_level=40, profile_dir=directory)
client = cluster.start_and_connect_sync()
view = client[:]
view.block = True
view.activate()
view.scatter("rank", range({RANKS}), flatten=True)
view.push({{"path": directory + "/store"}})
"""
PLAIN_MODEL = f"""%%px
{NET}
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group(
    "gloo", store=dist.FileStore(path, {RANKS}), rank=rank, world_size={RANKS}
)
mesh = init_device_mesh("cpu", ({RANKS},))
model = Net()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
PLAIN_STEP = f"""%%px
fails = {{place!r}}
{LOSS}
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""


def in_kernel(session: Any, *, rounds: int) -> dict[str, Any]:
    """Fail in every way, and return seconds by way; runs in the kernel."""
    error, usable = [], []
    _build(session)
    for number in range(rounds + _WARM_UP):
        raised = _fail(session, _PLACES[number % len(_PLACES)])
        error.append(time.monotonic() - raised)
        session.run(USABLE, show=False)
        usable.append(time.monotonic() - raised)
    interrupts = [_interrupted(session) for _ in range(rounds)]
    deaths = [_death(session) for _ in range(_DEATHS)]
    return {
        "error": error[_WARM_UP:],
        "usable": usable[_WARM_UP:],
        "interrupt": interrupts,
        "death_told": [told for told, _ in deaths],
        "death_usable": [usable for _, usable in deaths],
    }


def _build(session: Any) -> None:
    session.run(NET, show=False)
    session.model(MODEL, show=False)


def _fail(session: Any, place: str) -> float:
    """Train until a rank raises, and return when that was."""
    from fsdp_magic.errors import CellFailedError

    session.run("fails = None", show=False)
    session.train(LOSS, steps=2, show=False)
    session.run(f"fails = {place!r}", show=False)
    try:
        session.train(LOSS, steps=2, show=False)
    except CellFailedError as error:
        return float(error.exceptions[1].message)
    raise RuntimeError("the step did not fail")


def _interrupted(session: Any) -> float:
    """Return the seconds from an interrupt to the prompt, one rank looping, its peer waiting."""
    at: list[float] = []

    def press() -> None:
        at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, press)
    timer.start()
    try:
        session.run("if rank == 0:\n    while True: pass\ndist.barrier()", show=False)
    except KeyboardInterrupt:
        return time.monotonic() - at[0]
    raise RuntimeError("the cell was not interrupted")


def _death(session: Any) -> tuple[float, float]:
    """Return how long it takes to be told of a death, and to an all_reduce on fresh engines."""
    from fsdp_magic.errors import EngineDiedError

    imports = "import os, signal, torch, torch.distributed as dist"
    session.run(imports, show=False)
    started = time.monotonic()
    try:
        session.run(
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()", show=False
        )
    except EngineDiedError:
        told = time.monotonic() - started
    session.restart()
    session.run(imports, show=False)
    session.run(USABLE, show=False)
    return told, time.monotonic() - started


# ---------------------------------------------------------------- the same in %%px


class PlainKernel(Kernel):
    """A kernel whose cells may hang."""

    def bounded(self, code: str, *, seconds: float) -> dict[str, Any]:
        """Execute a cell, interrupt it if it has not ended in time, and say what happened."""
        printed: list[str] = []

        def hook(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "error":
                printed.append(f"{content['ename']}: {content['evalue']}")
            printed.append(content.get("text", ""))

        pressed: list[float] = []

        def press() -> None:
            pressed.append(time.monotonic())
            self._manager.interrupt_kernel()

        timer = threading.Timer(seconds, press)
        timer.start()
        started = time.monotonic()
        try:
            reply = self._client.execute_interactive(
                code, output_hook=hook, timeout=2 * seconds, allow_stdin=False
            )
            ended = reply["content"].get("ename", "in order")
        except TimeoutError:
            ended = "not at all"
        timer.cancel()
        timer.join()
        return {
            "ended": ended,
            "seconds": round(time.monotonic() - started, 2),
            "interrupted": bool(pressed),
            "answers": "".join(printed).count("here"),
            "said": re.split(r"[\r\n]", "".join(printed).strip())[-1],
        }


def in_px() -> dict[str, Any]:
    """Let a rank raise in ``%%px`` while its peer waits, and return what happens then."""
    found: dict[str, Any] = {}
    for place in _PLACES:
        kernel = PlainKernel()
        try:
            kernel.run(PLAIN_SETUP)
            kernel.run(PLAIN_MODEL)
            kernel.run(PLAIN_STEP.format(place=None))
            failed = kernel.bounded(PLAIN_STEP.format(place=place), seconds=_HANG_SECONDS)
            again = kernel.bounded("%%px\nprint('here')", seconds=_HANG_SECONDS)
            failed.pop("answers")
            found[place] = {
                "the_cell": failed,
                "the_next_cell": again,
                "ranks_that_answered_it": again.pop("answers"),
            }
        finally:
            kernel.bounded("cluster.stop_cluster_sync()", seconds=_HANG_SECONDS)
            kernel.close()
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Start kernels and engines, and return the figures."""
    start = machine()
    kernel = Kernel()
    try:
        kernel.run(SETUP)
        say(f"{rounds} failures, {rounds} interrupts, {_DEATHS} deaths")
        took = json.loads(kernel.run(MEASURE.format(rounds=rounds)).stdout.splitlines()[-1])
    finally:
        kernel.close()
    say("the same in %%px")
    seconds = {way: summary(values) for way, values in took.items()}
    return {
        "benchmark": "recovery",
        "passes": seconds["usable"]["median"] <= BOUND,
        "bound": BOUND,
        "seconds": seconds,
        "px": in_px(),
        "rounds": rounds,
        "machine": start,
    }


def main() -> int:
    """Measure, print the result, and return 1 if it misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    result = measure(parser.parse_args().rounds)
    print(json.dumps(result))
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
