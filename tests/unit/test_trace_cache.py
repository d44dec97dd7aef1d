"""Kept traces: found again while nothing has changed, and never otherwise."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_magic.core.planning.requests import FileRead, TraceReport, TraceRequest, TraceVariant
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Freed,
    OptimizerAllocated,
    OptimizerTrace,
    Reached,
    Size,
    StepTrace,
    TracedModule,
    TracedParameter,
)
from fsdp_magic.core.planning.trace_codec import decoded, encoded
from fsdp_magic.notebook import trace_cache

REQUEST = TraceRequest(code="model = net", name="<cell 1>", variants=(TraceVariant("bf16"),))
TRACE = StepTrace(
    parameters={"w": TracedParameter(name="w", shape=(2, 3), trained=False)},
    modules={"": TracedModule(class_name="Net", parameters=("w",))},
    micro_step=(
        Allocated(0, Size(1.0, 2.5, 0.0), "activation", "h.0", "aten::mm"),
        Reached("backward"),
        Freed(0, carried=True),
    ),
    optimizer=OptimizerTrace(
        name="AdamW", first=(OptimizerAllocated(0, "w", 8.0, 0.0, "optimizer"),), later=(Freed(0),)
    ),
    units={"blocks": (("h.0",),), "none": ()},
)
REPORT = TraceReport(traces={TraceVariant("bf16"): TRACE}, seconds=1.5, notes=("a",), files=())


@pytest.fixture(autouse=True)
def kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep traces in a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def entry() -> Path:
    (path,) = trace_cache.directory().iterdir()
    return path


def test_records_come_back_equal_through_json() -> None:
    assert decoded(json.loads(json.dumps(encoded(REPORT)))) == REPORT


@pytest.mark.parametrize("value", [["Path", "/etc"], ["builtins.exec", "x"], [["()"]], ["Size"]])
def test_lists_that_stand_for_no_record_make_nothing(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        decoded(value)


def test_what_was_kept_is_found_and_says_so() -> None:
    trace_cache.keep(REQUEST, REPORT)
    assert trace_cache.found(replace(REQUEST, name="<cell 2>")) == replace(REPORT, cached=True)


def test_only_the_person_can_read_it() -> None:
    trace_cache.keep(REQUEST, REPORT)
    assert entry().stat().st_mode & 0o777 == 0o600
    assert trace_cache.directory().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, code="model = net2"),
        replace(REQUEST, variants=(TraceVariant("fp16"),)),
        replace(REQUEST, wraps=("none",)),
        replace(REQUEST, sequence_length=5),
        replace(REQUEST, device_kind="cpu"),
    ],
)
def test_another_request_is_traced_anew(other: TraceRequest) -> None:
    trace_cache.keep(REQUEST, REPORT)
    assert trace_cache.found(other) is None


def test_another_directory_or_version_is_traced_anew(
    kept_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_cache.keep(REQUEST, REPORT)
    with monkeypatch.context() as patch:
        patch.setattr(trace_cache, "_source_digest", lambda: "another")
        assert trace_cache.found(REQUEST) is None
    for module, name in ((importlib.metadata, "version"), (sys, "version")):
        with monkeypatch.context() as patch:
            patch.setattr(
                module, name, (lambda _: "0.0") if callable(getattr(module, name)) else "0"
            )
            assert trace_cache.found(REQUEST) is None
    monkeypatch.chdir(kept_here)
    assert trace_cache.found(REQUEST) is None


def test_a_changed_source_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = trace_cache._source_digest.__wrapped__
    monkeypatch.setattr(trace_cache, "_PACKAGE", tmp_path)
    found = set()
    for folder in ("core", "engine"):
        (tmp_path / folder / "deeper").mkdir(parents=True)
        for text in ("a = 1", "a = 2"):
            (tmp_path / folder / "deeper" / "module.py").write_text(text)
            found.add(digest())
    assert len(found) == 4


def described(path: Path) -> FileRead:
    status = path.stat()
    digest = trace_cache.digest_of(str(path))
    return FileRead(str(path), status.st_size, status.st_mtime_ns, digest)


def test_a_file_that_was_read_must_be_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("layers: 2")
    read = described(file)
    trace_cache.keep(REQUEST, replace(REPORT, files=(read,)))
    assert trace_cache.found(REQUEST)
    os.utime(file, ns=(1, 1))  # touched, with the same content
    assert trace_cache.found(REQUEST)
    file.write_text("layers: 3")
    assert trace_cache.found(REQUEST) is None
    file.write_text("layers: 20")
    os.utime(file, ns=(read.mtime_ns, read.mtime_ns))  # as old, but of another size
    assert trace_cache.found(REQUEST) is None
    file.unlink()
    assert trace_cache.found(REQUEST) is None


def test_what_read_too_much_is_not_kept() -> None:
    trace_cache.keep(REQUEST, replace(REPORT, files=None))
    assert not trace_cache.directory().exists()


@pytest.mark.parametrize(
    "damaged", [b"", b"x", zlib.compress(b"[]"), zlib.compress(b'["Size", 1, 2, 3]')]
)
def test_a_damaged_entry_is_as_good_as_none(damaged: bytes) -> None:
    trace_cache.keep(REQUEST, REPORT)
    entry().write_bytes(damaged)
    assert trace_cache.found(REQUEST) is None
    trace_cache.keep(REQUEST, REPORT)
    assert trace_cache.found(REQUEST)


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_cache.keep(REQUEST, REPORT)
    os.utime(entry(), ns=(1, 1))
    monkeypatch.setattr(trace_cache, "MOST_BYTES", entry().stat().st_size)
    other = replace(REQUEST, code="model = net2")
    trace_cache.keep(other, REPORT)
    assert trace_cache.found(REQUEST) is None
    os.utime(entry(), ns=(1, 1))
    assert trace_cache.found(other)
    assert entry().stat().st_mtime > 1  # what was used last goes last


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    trace_cache.keep(REQUEST, REPORT)
    assert trace_cache.found(REQUEST) is None
