"""The short notebook that every set of versions must run; prints the versions it ran with."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
from kernels import Kernel, kernel

SETUP = """%%fsdp
import time, torch
torch.manual_seed(0)
data = [(torch.ones(2) * i, torch.ones(1)) for i in range(16)]
print("hello of", world_size)
"""
MODEL = """%%fsdp_model
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
TRAIN = (
    "%%fsdp_train --data data --steps 4 -o run\nloss = ((model(batch[0]) - batch[1]) ** 2).mean()"
)
LONG = """%%fsdp_train --data data --steps 100000 -o run
loss = model(batch[0]).mean()
time.sleep(0.02)
"""
PACKAGES = ("ipython", "ipykernel", "ipyparallel", "jupyter_client", "traitlets", "torch")


async def works(kernel: Kernel) -> None:
    """Run the tour: start, cells, a model, training, status, help."""
    started = await kernel.run("%load_ext fsdp_magic\n%fsdp_init -n 2 --device cpu")
    assert started.status == "ok", started
    assert "rank" in started.html[0]
    hello = await kernel.run(f"{SETUP}rank")
    assert "[ranks 0-1] hello of 2\n" in hello.text, hello
    assert "[rank 1] 1" in hello.text, hello
    assert (await kernel.run(MODEL)).html, "a mosaic"
    trained = await kernel.run(TRAIN)
    assert 'aria-label="Training run: Done"' in trained.html[-1], trained
    assert (await kernel.run("print(run.state, len(run.losses))")).text == "done 4\n"
    assert (await kernel.run("%fsdp_status")).html
    assert (await kernel.run("%fsdp_train?")).status == "ok"
    px = await kernel.run("%px x = 1")
    assert px.status == "ok", px


async def fails_well(kernel: Kernel) -> None:
    """See that errors are short."""
    wrong = await kernel.run("%%fsdp\n1 / 0")
    assert wrong.status == "error"
    assert "ZeroDivisionError" in wrong.traceback, wrong.traceback
    assert "fsdp_magic/" not in wrong.traceback, wrong.traceback
    typo = await kernel.run("%%fsdp_train --stepz 3\nloss = 1")
    assert len(typo.traceback.splitlines()) == 1, typo.traceback
    assert "did you mean --steps?" in typo.traceback


async def stops(kernel: Kernel) -> None:
    """Interrupt a run: the cells queued behind it do not run, and the session goes on."""
    running, queued = kernel.submit(LONG), kernel.submit("queued = 1")
    await asyncio.sleep(1.5)
    await kernel.interrupt()
    stopped = await kernel.shown(running)
    assert stopped.status == "error", stopped
    assert (await kernel.shown(queued)).status in ("error", "aborted")
    after = await kernel.run("print(run.state, 'queued' in globals())")
    assert after.text == "stopped False\n", after
    assert (await kernel.run(TRAIN)).status == "ok"


async def completes(kernel: Kernel) -> None:
    """See that Tab offers what it can under this version."""
    modern = tuple(map(int, version("ipython").split(".")[:2])) >= (8, 6)
    found = await kernel.complete("%fsdp_init --memo")
    assert found == (["--memory-limit"] if modern else found)
    if modern:
        assert "model" in await kernel.complete("%%fsdp\nprint(mod")


async def main() -> None:
    """Run everything in one kernel."""
    with tempfile.TemporaryDirectory() as directory:
        async with kernel(directory) as running:
            for part in (works, fails_well, completes, stops):
                await part(running)
            ended = await running.run("%fsdp_shutdown\n%unload_ext fsdp_magic")
            assert ended.status == "ok", ended
    print(f"Python {sys.version.split()[0]}", *(f"{name} {version(name)}" for name in PACKAGES))


if __name__ == "__main__":
    asyncio.run(main())
