"""The files that snapshots are in: what is written comes back, and half a snapshot is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fsdp_magic.engine import snapshot_files
from fsdp_magic.engine.snapshot_files import SnapshotFile
from fsdp_magic.notebook.snapshot_files import SnapshotFiles


@pytest.fixture
def file() -> Iterator[SnapshotFile]:
    files = SnapshotFiles(1)
    yield SnapshotFile(files.paths(0)[0])
    files.close()


TENSORS = [
    torch.randn(5, 3),
    torch.randn(4, 6).t(),
    torch.randn(7).to(torch.bfloat16),
    torch.tensor(3, dtype=torch.int64),
    torch.tensor([True, False]),
    torch.empty(0, 4),
    torch.randn(3, dtype=torch.complex128),
]


def test_what_is_written_comes_back(file):
    assert file.number == 0
    size = file.write(3, {"step": 7}, TENSORS)
    assert file.number == 3
    with file.reading() as (content, reader):
        assert content == {"step": 7}
        for index, tensor in enumerate(TENSORS):
            back = reader.tensor(index)
            assert torch.equal(back, tensor)
            assert back.dtype == tensor.dtype
    assert size >= sum(t.numel() * t.element_size() for t in TENSORS)


def test_a_smaller_snapshot_replaces_a_larger_one_and_forgetting_leaves_nothing(file):
    file.write(1, "large", [torch.zeros(1000)])
    file.write(2, "small", [torch.ones(2)])
    with file.reading() as (content, reader):
        assert (content, reader.tensor(0).tolist()) == ("small", [1.0, 1.0])
    file.forget()
    assert file.number == 0


def test_a_snapshot_whose_writer_ended_is_none(file, monkeypatch):
    file.write(1, "whole", [torch.zeros(10)])

    def ends(tensor: torch.Tensor) -> memoryview:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot_files, "raw_bytes", ends)
    with pytest.raises(KeyboardInterrupt):
        file.write(2, "torn", [torch.zeros(10)])
    assert file.number == 0


def test_memory_that_is_not_there_is_refused_before_it_is_touched(file, monkeypatch):
    monkeypatch.setattr(
        snapshot_files.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})
    )
    file.write(1, "fits", [torch.zeros(10)])
    with pytest.raises(OSError, match=r"are needed and 1,000 are free"):
        file.write(2, "does not", [torch.zeros(100_000)])
    assert file.number == 0


def test_no_file_is_left_open(file):
    before = len(os.listdir("/proc/self/fd"))
    file.write(1, "", TENSORS)
    with file.reading() as (_, reader):
        reader.tensor(0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_kernel_knows_the_newest_step_that_all_ranks_have() -> None:
    files = SnapshotFiles(2)
    first, second = ([SnapshotFile(path) for path in files.paths(rank)] for rank in range(2))
    assert files.newest_step is None
    for number, step in ((1, 10), (2, 20)):
        first[number - 1].write(number, "", [], step=step)
    second[0].write(1, "", [], step=10)
    assert files.newest_step == 10
    second[1].write(2, "", [], step=20)
    assert files.newest_step == 20
    files.forget()
    assert (files.newest_step, files.used_bytes) == (None, 0)
    files.close()
    assert files.newest_step is None
