"""How a process ended that is nobody's child here: while it is a zombie, and after that."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fsdp_magic.notebook.exit_codes import exit_code_of_orphan

ENDS = [("exit 7", 7), ("kill -9 $$", -9), ("exit 0", 0)]
TELLS_AFTERWARDS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)


@contextmanager
def orphan(command: str) -> Iterator[tuple[int, int]]:
    """Have a process whose parent has ended; yields its id and its descriptor."""
    # it waits until its standard input is closed, so that it is there to be opened
    starts = f"exec 3<&0; sh -c 'read line; {command}' <&3 3<&- >/dev/null & echo $!"
    with subprocess.Popen(
        ["sh", "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.read())
        descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(5_000), "it has not ended"
        yield pid, descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("command", "code"), ENDS)
def test_an_orphan_tells_how_it_ended(command: str, code: int) -> None:
    with orphan(command) as (pid, descriptor):
        assert exit_code_of_orphan(pid, descriptor) == code


def test_it_does_after_somebody_has_waited_for_it() -> None:
    with orphan("kill -9 $$") as (pid, descriptor):
        deadline = time.monotonic() + 5
        while (inherited := os.path.exists(f"/proc/{pid}")) and time.monotonic() < deadline:
            time.sleep(0.02)
        known = -9 if inherited or TELLS_AFTERWARDS else None
        assert exit_code_of_orphan(pid, descriptor) == known


def test_one_that_lives_has_no_exit_code() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        assert exit_code_of_orphan(os.getpid(), descriptor) is None
    finally:
        os.close(descriptor)
