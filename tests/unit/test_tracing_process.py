"""The process that traces a cell: what it prints, how it fails, and that nothing of it is left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

import fsdp_magic
from fsdp_magic.errors import CellFailedError, FsdpError, OutOfMemoryOnRankError

CELL = """
import os, sys, torch
from torch import nn
from pathlib import Path
layers = int(Path("layers.txt").read_text())
print("building", layers)
assert os.getsid(0) == os.getpid() and os.environ["CUDA_VISIBLE_DEVICES"] == ""
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]).to("cuda")
model.eval()
def example_batch(b):
    return torch.zeros(b, 8)
def loss_fn(model, batch):
    assert model.training
    return model(batch).square().mean()
print("built", end="")
"""
"""Its process is in a session of its own, without cards; the model trains; no line is lost."""


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a directory of the test's own, where traces are kept, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_cell_is_planned_and_a_second_time_found(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("layers.txt").write_text("3")
    with caplog.at_level(logging.INFO, logger="fsdp_magic"):
        plan = fsdp_magic.plan(CELL, gpu_memory="A100-80GB", world_size=4, strategies=["ddp"])
    assert capsys.readouterr().out.startswith("building 3\nbuilt")
    assert "Memory plan" in caplog.text
    assert len(plan["ddp"].trace.parameters) == 6
    assert plan["ddp"].trace.optimizer.name == "AdamW (foreach)"  # the default on CUDA
    assert plan.device.name == "A100-80GB"
    started = time.monotonic()
    again = fsdp_magic.plan(CELL, world_size=1024, strategies=["ddp", "full_shard"], show=False)
    assert time.monotonic() - started < 2
    assert again["ddp"].trace == plan["ddp"].trace
    assert any("traced before" in note for note in again.notes)


def test_an_interrupted_plan_leaves_nothing() -> None:
    plan = fsdp_magic.plan  # imported before it can be interrupted
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="nothing was planned"):
        plan("import time; time.sleep(60)", show=False)
    assert time.monotonic() - started < 5
    interrupt.join()
    assert not psutil.Process().children(recursive=True)


FAILING = {
    "def f():\n    return 1 / 0\nf()": (CellFailedError, r"line 2, in f(.|\n)*ZeroDivisionError"),
    "model = (": (CellFailedError, "was never closed"),
    "import sys; sys.exit(3)": (CellFailedError, "SystemExit: 3"),
    "x = bytearray(1 << 45)": (OutOfMemoryOnRankError, "let the cell load no data or weights"),
    "import ctypes; ctypes.string_at(0)": (FsdpError, "SIGSEGV(.|\n)*custom kernel"),
    "import os; os.kill(os.getpid(), 9)": (FsdpError, "SIGKILL(.|\n)*memory runs out"),
    "import os; os._exit(3)": (FsdpError, r"exit code 3\)(.|\n)*take exit"),
    "import os; [os.fork() for _ in range(2)]; os._exit(0)": (FsdpError, "exit code 0"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("cell", FAILING)
def test_a_cell_that_fails_says_why(cell: str) -> None:
    kind, says = FAILING[cell]
    with pytest.raises(kind, match=says) as caught:
        fsdp_magic.plan(cell, show=False)
    assert "fsdp_magic/engine" not in str(caught.value)


@pytest.mark.nightly
def test_a_file_that_the_cell_read_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    for layers in (2, 4):
        Path("layers.txt").write_text(str(layers))
        plan = fsdp_magic.plan(CELL, strategies=["ddp"], show=False)
        assert len(plan["ddp"].trace.parameters) == 2 * layers
    fsdp_magic.plan(CELL, strategies=["ddp"], no_cache=True)
    assert "building 4" in capsys.readouterr().out


@pytest.mark.nightly
def test_it_does_not_outlive_the_notebook() -> None:
    cell = "import time, os; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    script = f"import fsdp_magic; fsdp_magic.plan({cell!r})"
    kernel = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    while not Path("pid").exists() or not Path("pid").read_text():
        time.sleep(0.05)
    tracer = psutil.Process(int(Path("pid").read_text()))
    kernel.kill()
    kernel.wait()
    tracer.wait(timeout=2)


ELSEWHERE = """
import os, signal, sys
for module, names in (
    (signal, ("SIGRTMIN", "SIGRTMAX", "pidfd_send_signal")),
    (os, ("pidfd_open", "memfd_create", "sched_getaffinity", "MFD_CLOEXEC")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


@pytest.mark.nightly
def test_a_plan_is_made_on_systems_that_have_no_engines(tmp_path: Path) -> None:
    """What macOS lacks of Linux is taken away."""
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    Path("layers.txt").write_text("2")
    script = f"import fsdp_magic; print(fsdp_magic.plan({CELL!r}, strategies=['ddp'], show=False))"
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )
    assert "largest micro-batch ddp" in done.stdout, done.stderr


DETACHED = """
import os, subprocess, sys
code = "import time; time.sleep(60)"
started = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open("pid", "w").write(str(started.pid))
os._exit(3)
"""


def test_nobody_waits_for_a_process_that_the_cell_left_elsewhere() -> None:
    before = threading.active_count()
    with pytest.raises(FsdpError, match="exit code 3"):
        fsdp_magic.plan(DETACHED, show=False)
    left = psutil.Process(int(Path("pid").read_text()))
    assert left.status() != psutil.STATUS_ZOMBIE
    left.kill()
    assert threading.active_count() == before
