"""KERNEL: traces kept on disk: a plan of a cell that has not changed takes a moment.

An entry is found by what the trace depends on: the cell, the options that change it, the directory
it ran in, the versions of Python, torch, transformers and this package. It names every file that
the cell read, with its content's digest, and counts only while all of them are as they were.
Environment variables, the clock and what the cell asked of a network are not looked at.

Entries are compressed JSON in a directory of the person's own; a damaged one is as good as none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import zlib
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path

from fsdp_magic.core.planning.requests import FileRead, TraceReport, TraceRequest
from fsdp_magic.core.planning.trace_codec import decoded, encoded
from fsdp_magic.core.units import MIB

MOST_BYTES = 256 * MIB
"""Of all entries together; the oldest go first."""
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("torch", "transformers", "peft")
_SUFFIX = ".trace"


def directory() -> Path:
    """Return where traces are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fsdp_magic" / "traces"


def found(request: TraceRequest) -> TraceReport | None:
    """Return what was traced before for a request, if nothing has changed since."""
    path = _path(request)
    try:
        report = decoded(json.loads(zlib.decompress(path.read_bytes())))
        if not isinstance(report, TraceReport) or not all(map(_is_as_it_was, report.files or ())):
            return None
        path.touch()  # the newest to go
    except Exception:  # whatever a damaged file leads to
        return None
    return replace(report, cached=True)


def keep(request: TraceRequest, report: TraceReport) -> None:
    """Keep what was traced, where that is possible and all of it was."""
    if report.files is None or report.untraced:
        return
    with suppress(OSError, TypeError):
        place = directory()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = zlib.compress(json.dumps(encoded(report)).encode(), 3)
        descriptor, name = tempfile.mkstemp(dir=place)  # for the owner's eyes only
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, _path(request))
        _make_room(place)


def digest_of(path: str) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _path(request: TraceRequest) -> Path:
    """Return where the trace of a request is kept; how a cell is called does not matter."""
    key = [*astuple(replace(request, name="")), os.getcwd(), *_versions()]
    return directory() / (hashlib.sha256(repr(key).encode()).hexdigest() + _SUFFIX)


def _versions() -> list[str]:
    found = [sys.version, _source_digest()]
    for library in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{library} {importlib.metadata.version(library)}")
    return found


@functools.cache
def _source_digest() -> str:
    """Return a digest of this package's own source."""
    digest = hashlib.sha256()
    for folder in ("core", "engine"):
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_as_it_was(read: FileRead) -> bool:
    """Return whether a file is as it was, by its time or else by its content."""
    try:
        status = os.stat(read.path)
        if status.st_size != read.size:
            return False
        return status.st_mtime_ns == read.mtime_ns or digest_of(read.path) == read.digest
    except OSError:
        return False


def _make_room(place: Path) -> None:
    entries = sorted(place.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in entries:
        total += path.stat().st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
