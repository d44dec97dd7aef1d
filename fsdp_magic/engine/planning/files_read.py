"""TRACER: which files of the person's the cell read, so that a kept trace can tell when it is old.

Python says what it opens (its audit events); what C code opens by itself is not heard. Not counted
are files of installed libraries, whose versions are known otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import site
import stat
import sys
from pathlib import Path
from typing import Any

from fsdp_magic.core.planning.requests import FileRead
from fsdp_magic.core.units import MIB

_MOST_FILES = 1000
"""More are data, and looking at them all would take longer than tracing."""
_MOST_DIGESTED_BYTES = 256 * MIB
"""Of larger files only size and time are looked at."""
_PACKAGE = str(Path(__file__).resolve().parents[2])
_SYSTEM = ("/proc/", "/sys/", "/dev/")


class FilesRead:
    """Hears which files are opened from when it is made; for the life of the process."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        self._is_open = True
        sys.addaudithook(self._hear)

    def report(self) -> tuple[FileRead, ...] | None:
        """Return what was read; None: too much to be looked at again. Hears no more."""
        self._is_open = False
        paths = dict.fromkeys(filter(_is_persons, map(_source, self._paths)))
        if len(paths) > _MOST_FILES:
            return None
        return tuple(found for path in paths if (found := _described(path)) is not None)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._is_open:
            return
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else mode != "r"
        if isinstance(path, str | bytes) and not writes:
            self._paths[os.path.abspath(os.fsdecode(path))] = None


def _source(path: str) -> str:
    """Return the source of a compiled module: that is what a person changes."""
    if not path.endswith(".pyc"):
        return path
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:
        return path


def _is_persons(path: str) -> bool:
    """Return whether a file is none of a library's; most are, and by their names already."""
    if path.startswith(_not_persons()):
        return False
    return not os.path.realpath(path).startswith(_not_persons())


@functools.cache
def _not_persons() -> tuple[str, ...]:
    libraries = (sys.prefix, sys.base_prefix, site.getusersitepackages(), _PACKAGE)
    names = dict.fromkeys((*libraries, *map(os.path.realpath, libraries)))
    return (*_SYSTEM, *(f"{name}{os.sep}" for name in names))


def _described(path: str) -> FileRead | None:
    """Return a file as it is now; None: it is none any more."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        digest = ""
        if status.st_size <= _MOST_DIGESTED_BYTES:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
    return FileRead(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns, digest=digest)
