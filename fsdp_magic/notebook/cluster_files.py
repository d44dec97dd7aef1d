"""KERNEL: the files of a cluster: its shared page, its directory, its processes' logs."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from pathlib import Path

from fsdp_magic.core.page import page_bytes

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
