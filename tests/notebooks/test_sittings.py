"""What people do in notebooks: run all twice, edit a cell, have two open, stop one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
from kernels import QUIET, Kernel, Shown, kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.timeout(150)

INIT = "%load_ext fsdp_magic\nsession = %fsdp_init -n 2 --device cpu"
DATA = """%%fsdp
import time, torch
torch.manual_seed(0)
data = [(torch.randn(2), torch.ones(1)) for i in range(16)]
torch.distributed.barrier()
print("ready", world_size)
"""
MODEL = """%%fsdp_model
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAIN = """%%fsdp_train --data data --micro-batch-size 4 -o run
loss = ((model(batch[0]) - batch[1]) ** 2).mean()
"""
NOTEBOOK = (INIT, DATA, MODEL, TRAIN, "print(run.losses, run.steps)", "%fsdp_status")
TYPO = "%%fsdp_train --stepz 3\nloss = 1"
PIDS = "print(*(rank.pid for rank in session.status(show=False)))"


@pytest.fixture(scope="module")
def sitting(
    test_run: str, kept_sessions: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A kernel: ``.do`` runs a coroutine, ``.first`` is the kernel, ``.homes`` are two homes.

    The guards around each test know its processes by their home, which is in their environment.
    """
    homes = [str(tmp_path_factory.mktemp(name)) for name in ("first", "second")]
    kept = SimpleNamespace(directory=homes[0])
    kept_session = SimpleNamespace(running=True, engines=SimpleNamespace(cluster=kept))
    kept_sessions.append(kept_session)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        first = runner.run(stack.enter_async_context(kernel(homes[0], TMPDIR=homes[0])))
        yield SimpleNamespace(do=runner.run, first=first, homes=homes)
        runner.run(stack.aclose())
    kept_session.running = False


async def all_of(kernel: Kernel, cells: tuple[str, ...] = NOTEBOOK) -> list[Shown]:
    """Run cells that must all work."""
    shown = [await kernel.run(cell) for cell in cells]
    assert [s.error for s in shown] == [None] * len(shown), shown
    return shown


def engines(home: str) -> set[int]:
    """Return the process ids of the engines of a kernel."""
    found = set()
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("HOME") == home
            if mine and any("fsdp_magic.engine" in part for part in process.cmdline()):
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_run_all_twice_gives_the_same_twice_on_the_same_engines(sitting: Any) -> None:
    first = sitting.do(all_of(sitting.first))
    pids = sitting.do(sitting.first.run(PIDS)).text
    second = sitting.do(all_of(sitting.first))
    assert sitting.do(sitting.first.run(PIDS)).text == pids
    assert "This session was running already" in second[0].text
    assert second[1].text == first[1].text == "[ranks 0-1] ready 2\n"
    assert second[4].text == first[4].text, "a fresh model, trained anew"
    assert first[4].text.endswith("] 2\n")
    assert 'aria-label="Training run: Done"' in second[5].html[-1]


def test_an_edited_cell_is_the_one_that_runs_and_that_tracebacks_show(sitting: Any) -> None:
    cell = "%%fsdp\ndef scale(x):\n    return x / {}\nscale(6)"
    broken = sitting.do(sitting.first.run(cell.format("0  # old")))
    assert "return x / 0  # old" in broken.traceback
    assert sitting.do(sitting.first.run(cell.format("3"))).text == "[ranks 0-1] 2.0\n"
    again = sitting.do(sitting.first.run(cell.format("(1 - 1)  # new")))
    assert "return x / (1 - 1)  # new" in again.traceback
    assert "old" not in again.traceback


LONG = f"{TRAIN.replace('-o run', '--steps 60 -o run')}open('training', 'w')\ntime.sleep(0.02)\n"


async def beside(first: Kernel, home: str) -> Any:
    """Execute a notebook with nbclient, which an error ends, while another is interrupted."""
    cells = (*NOTEBOOK[:3], LONG, "print(run.state, run.steps)", TYPO, "print('not reached')")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": home}})
    places = {"HOME": home, "IPYTHONDIR": home, "TMPDIR": home}
    executing = asyncio.create_task(client.async_execute(env=os.environ | QUIET | places))
    sleeping, queued = first.submit("%%fsdp\ntime.sleep(60)"), first.submit("queued = 1")
    while not Path(home, "training").exists():
        assert not executing.done(), executing.result()
        await asyncio.sleep(0.05)
    assert len(engines(home)) >= 2
    await first.interrupt()
    assert "interrupted" in (await first.shown(sleeping)).traceback
    assert (await first.shown(queued)).status in ("error", "aborted")
    with pytest.raises(CellExecutionError):
        await executing
    return notebook


def test_two_notebooks_do_not_meet_and_an_error_ends_one_with_our_line(sitting: Any) -> None:
    """Also: what nbclient leaves in the file; one's end leaves the other alone."""
    notebook = sitting.do(beside(sitting.first, sitting.homes[1]))
    *_, state, typo, after = notebook.cells
    assert state.outputs[0].text == "done 60\n", "not interrupted with the other"
    (error,) = typo.outputs
    assert (error.ename, len(error.traceback)) == ("UsageError", 1)
    assert "did you mean --steps?" in error.traceback[0]
    assert after.outputs == []
    panels = [o.data["text/html"] for o in notebook.cells[3].outputs if "data" in o]
    assert 'aria-label="Training run: Done"' in panels[0]
    deadline = time.monotonic() + 10
    while engines(sitting.homes[1]) and time.monotonic() < deadline:
        time.sleep(0.1)  # where the kernel took long to end them, their watchers do it
    assert engines(sitting.homes[1]) == set()
    assert sitting.do(sitting.first.run("print('queued' in globals())")).text == "False\n"
    sitting.do(all_of(sitting.first, NOTEBOOK[2:5]))


async def interrupted_training(first: Kernel, home: str) -> list[Shown]:
    """Interrupt a training cell with another queued behind it; then finish its run."""
    await all_of(first, (*NOTEBOOK[:3], "import os; before = 1"))
    marker = Path(home, "begun")
    training, queued = first.submit(SLOW.format(marker=str(marker))), first.submit("before = 2")
    while not marker.exists():
        await asyncio.sleep(0.02)
    await first.interrupt()
    shown = [await first.shown(request) for request in (training, queued)]
    cells = (
        "print(before, run.state, run.steps < 200)",
        SLOW.format(marker="").replace("200", "4"),
    )
    return [*shown, *[await first.run(cell) for cell in cells]]


SLOW = """%%fsdp_train --data data --micro-batch-size 4 --steps 200 -o run
loss = ((model(batch[0]) - batch[1]) ** 2).mean()
time.sleep(0.01)
if {marker!r}: open({marker!r}, "w").close()
"""


def test_a_cell_queued_behind_an_interrupted_run_does_not_run(sitting: Any) -> None:
    first, queued, state, again = sitting.do(interrupted_training(sitting.first, sitting.homes[0]))
    assert 'aria-label="Training run: Stopped"' in first.html[-1]
    assert first.error is not None
    assert queued.status in ("error", "aborted")
    assert state.text == "1 stopped True\n"
    assert again.error is None


def test_px_works_from_its_first_use_and_on_fresh_engines(sitting: Any) -> None:
    sitting.do(all_of(sitting.first, (INIT,)))
    for _ in range(2):
        shown = sitting.do(sitting.first.run("%%px\nprint('from px')"))
        assert shown.text.count("from px") == 2, shown
        sitting.do(all_of(sitting.first, ("%px x = 1", "%%fsdp\nassert x == 1", "%fsdp_restart")))
