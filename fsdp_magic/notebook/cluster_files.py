"""KERNEL: the files of a cluster: its shared page, its directory, what its processes wrote."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import stat
from pathlib import Path

from fsdp_magic.core.errors import EngineDiedError
from fsdp_magic.core.page import page_bytes

_CRASH_LINES = 40
_LOG_LINES = 12


def new_page(path: Path, world_size: int) -> memoryview:
    """Make the file of the shared page, for its owner only, and map it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    try:
        os.ftruncate(descriptor, page_bytes(world_size))
        return memoryview(mmap.mmap(descriptor, page_bytes(world_size))).cast("Q")
    finally:
        os.close(descriptor)


def last_lines(log: str) -> str:
    """Return the end of a log."""
    return "\n".join(log.splitlines()[-_LOG_LINES:])


def empty(directory: str) -> None:
    """Remove everything in a directory that goes on being used."""
    for entry in Path(directory).iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def crash_report(log: str) -> str:
    """Return what the interpreter wrote when it crashed, as lines to add; empty if it did not."""
    start = log.find("Fatal Python error")
    return "" if start < 0 else "\n" + "\n".join(log[start:].splitlines()[:_CRASH_LINES])


def death(rank: int, code: int | None, crash: str) -> EngineDiedError:
    """Return the error that tells of the death of a rank's engine.

    Args:
        rank: whose engine.
        code: its exit code, negative for a signal; None: nobody knows.
        crash: what its interpreter wrote, as lines to add.
    """
    number = -code if code is not None and code < 0 else None
    how = f"exit code {code}" if number is None else signal.Signals(number).name
    how = "nobody can say how" if code is None else how
    host = socket.gethostname()
    return EngineDiedError(
        f"rank {rank} on {host} ended ({how}); type %fsdp_restart for fresh engines{crash}",
        rank=rank,
        host=host,
        signal=number,
    )
