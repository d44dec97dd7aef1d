"""A run seen in a real pseudo-terminal: one block that is drawn again, output above it."""

from __future__ import annotations

import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

import pytest
from terminal import Terminal

from fsdp_magic.notebook import training
from fsdp_magic.notebook.session import Session

CELL = """
import time
time.sleep(0.12)
print("step", step, "of rank", rank)
loss = model(torch.ones(1, 4)).mean()
"""


@contextmanager
def pseudo_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Make a pseudo-terminal of 100 × 30 stdout, and collect what is written to it."""
    reader, writer = pty.openpty()
    ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                written.append(os.read(reader, 4096))
            except OSError:  # the other end is closed
                return

    thread = threading.Thread(target=read)
    thread.start()
    with open(writer, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", stream)
        yield written
        stream.flush()
    thread.join()
    os.close(reader)


def test_a_run_in_a_terminal_is_one_block_beneath_what_ranks_print(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.model(
        "import torch\nmodel = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        show=False,
    )
    monkeypatch.setattr(training, "_FRAME_SECONDS", 0.1)
    with pseudo_terminal(monkeypatch) as written:
        run = session.train(CELL, steps=14)
    text = b"".join(written).decode()
    assert text.count("Running") >= 2
    assert "\x1b[" in text
    screen = Terminal(columns=100, rows=30)
    screen.write(text)
    printed = [line for line in screen.all if line.startswith("[rank")]
    assert sorted(printed) == sorted(
        f"[rank {rank}] step {step} of rank {rank}" for step in range(14) for rank in range(2)
    )
    assert run.last_frame is not None
    last = [line.rstrip() for line in run.last_frame[1].splitlines()]
    assert screen.all == [*printed, *last]
    assert last[0].startswith("✓ Done 100 %  step 14/14")
