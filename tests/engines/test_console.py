"""A console on a rank: opened when asked, on loopback, and cells are as before afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_magic.errors import CellInterrupted, UsageError
from fsdp_magic.notebook.session import Session

TRAIN = "loss = (model(batch) ** 2).mean()\nprint('micro', step)"
MODEL = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.ones(2) for _ in range(8)]
"""


def connection_file(session: Session, rank: int) -> Path:
    words = shlex.split(session.console(rank))
    assert words[0] == str(Path(sys.executable).with_name("jupyter"))
    assert words[1:3] == ["console", "--existing"]
    return Path(words[3])


TERMINAL = """
import json, sys
from jupyter_client import BlockingKernelClient

client = BlockingKernelClient(connection_file=sys.argv[1])
client.load_connection_file()
client.start_channels()
client.wait_for_ready(timeout=10)

def take(message):
    content = message["content"]
    said.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

for line in sys.stdin:
    said = []
    reply = client.execute_interactive(
        json.loads(line), timeout=20, output_hook=take, allow_stdin=False
    )
    print(json.dumps([reply["content"]["status"], "".join(said)]), flush=True)
"""
"""What ``jupyter console`` does, in a process of its own: it leaves event loops behind."""


class Console:
    """A console that is open."""

    def __init__(self, path: Path) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, "-c", TERMINAL, str(path)], **pipes)

    def answer(self, code: str) -> str:
        """Return what code shows: all that it prints, and its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code).encode() + b"\n")
        self._process.stdin.flush()
        status, said = json.loads(self._process.stdout.readline())
        assert status == "ok", said
        return str(said)

    def close(self) -> None:
        self._process.communicate(timeout=10)


@contextmanager
def console(session: Session, rank: int) -> Iterator[Console]:
    opened = Console(connection_file(session, rank))
    try:
        yield opened
    finally:
        opened.close()


def listening(pid: int) -> list[Any]:
    found = psutil.Process(pid).net_connections(kind="inet")
    return [c.laddr for c in found if c.status == "LISTEN"]


def test_a_console_sees_the_rank_and_cells_go_on_as_before(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(MODEL, show=False)
    pid = session.status(show=False)[1].pid
    before = len(listening(pid))
    with console(session, 1) as client:
        path = connection_file(session, 1)
        assert path.parent == Path(session.engines.cluster.directory)
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(json.loads(path.read_text())["key"]) >= 32
        ports = listening(pid)
        assert len(ports) == before + 5, "asked twice, bound once"
        assert {address.ip for address in ports} == {"127.0.0.1"}
        assert client.answer("rank") == "1"
        assert client.answer("print(len(data))\nseen = world_size") == "8\n"
        check_cells(session, capsys)
        assert client.answer("seen") == "2"
    check_cells(session, capsys)
    code = "globals().get('seen')"
    assert [o.result for o in session.run(code, show=False)] == [None, "2"]


def check_cells(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a plain and a training cell, whose output is complete and not shown twice."""
    capsys.readouterr()
    session.run("print('cell')")
    assert capsys.readouterr().out == "[ranks 0-1] cell\n"
    session.model(
        "model = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), 0.1)", show=False
    )
    run = session.train(TRAIN, data="data", micro_batch_size=2, steps=3)
    assert run.steps == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "micro" in line]
    assert lines == [f"[ranks 0-1] micro {step}" for step in range(3)]


def test_a_console_waits_while_a_cell_runs_and_an_interrupt_is_the_cells(
    session: Session,
) -> None:
    with console(session, 0) as client:
        said: list[str] = []

        def ask() -> None:
            said.append(client.answer("print('from the console')"))

        asking = threading.Timer(0.3, ask)
        asking.start()
        stopping = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        stopping.start()
        with pytest.raises(CellInterrupted):
            session.run("import time\ntime.sleep(30)", show=False)
        stopping.join()
        asking.join(10)
        assert said == ["from the console\n"]
    assert session.run("rank", show=False)[1].result == "1"


def test_a_rank_that_is_not_there_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="--rank 2 does not exist; this world has ranks 0 to 1"):
        session.console(2)
