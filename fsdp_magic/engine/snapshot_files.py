"""ENGINE: the files that hold a rank's snapshots: in memory, owned by the kernel.

A file outlives the engine that wrote it, because the kernel holds it open; the engine reaches it
by a path of the kernel's. Its layout: a header with the snapshot's number; an index, pickled; the
tensors, raw, each on a boundary of 64 bytes. The header is cleared first and written last, so a
snapshot whose writer died is none. Nothing else ever reads or writes these files.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from fsdp_magic.core.snapshot_header import HEADER_BYTES, SnapshotHeader
from fsdp_magic.engine.raw_bytes import raw_bytes

_INDEX_AT, _BOUNDARY, _BLOCK_BYTES = 64, 64, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in a file: what it is, and where its bytes begin, counted from the first tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


class SnapshotFile:
    """One of the files of a rank.

    Args:
        path: of the kernel's open file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def number(self) -> int:
        """The number of the snapshot in it; 0: there is none that is whole."""
        with self._opened() as file:
            return _header(file).number

    def forget(self) -> None:
        """Drop what is in it, and give its memory back."""
        with self._opened() as file:
            os.ftruncate(file, 0)

    def write(
        self, number: int, content: Any, tensors: Sequence[torch.Tensor], *, step: int = 0
    ) -> int:
        """Write a snapshot in place of the one that is there; one tensor at a time.

        Args:
            number: of the snapshot, from 1.
            content: anything that can be pickled.
            tensors: what it leads to.
            step: steps of training that it holds.

        Returns:
            Its size in bytes.

        Raises:
            OSError: if there is no memory for it; the file holds no snapshot then.
        """
        entries = _entries(tensors)
        index = pickle.dumps((content, entries))
        first = _aligned(_INDEX_AT + len(index))
        total = first + (entries[-1].offset + entries[-1].size if entries else 0)
        with self._opened() as file:
            _write(file, memoryview(bytes(_INDEX_AT)), 0)
            _check_room(file, total)
            os.ftruncate(file, total)
            _write(file, memoryview(index), _INDEX_AT)
            for tensor, entry in zip(tensors, entries, strict=True):
                _write(file, raw_bytes(tensor.detach().cpu().contiguous()), first + entry.offset)
            header = SnapshotHeader(
                number=number, step=step, index_bytes=len(index), tensors_at=first
            )
            _write(file, memoryview(header.pack()), 0)
        return total

    @contextmanager
    def reading(self) -> Iterator[tuple[Any, SnapshotReader]]:
        """Read the snapshot inside: its content, and what reads its tensors."""
        with self._opened() as file:
            header = _header(file)
            content, entries = pickle.loads(os.pread(file, header.index_bytes, _INDEX_AT))
            yield content, SnapshotReader(file, entries, header.tensors_at)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)


class SnapshotReader:
    """Reads tensors out of an open file.

    Args:
        file: its descriptor.
        entries: of the tensors.
        first: where the first one begins.
    """

    def __init__(self, file: int, entries: Sequence[TensorEntry], first: int) -> None:
        self._file = file
        self.entries = entries
        self._first = first

    def tensor(self, index: int) -> torch.Tensor:
        """Return a tensor, on the CPU."""
        entry = self.entries[index]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        view, place = raw_bytes(tensor), self._first + entry.offset
        done = 0
        while done < len(view):
            done += os.preadv(self._file, [view[done:]], place + done)
        return tensor


def _header(file: int) -> SnapshotHeader:
    return SnapshotHeader.unpack(os.pread(file, HEADER_BYTES, 0))


def _entries(tensors: Sequence[torch.Tensor]) -> list[TensorEntry]:
    entries, offset = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        entries.append(TensorEntry(dtype=tensor.dtype, shape=shape, offset=offset, size=size))
        offset = _aligned(offset + size)
    return entries


def _write(file: int, view: memoryview, place: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], place + done)


def _check_room(file: int, total: int) -> None:
    """Raise before the host runs out of memory, whose kernel would end a process for it."""
    missing = total - os.fstat(file).st_blocks * _BLOCK_BYTES
    available = psutil.virtual_memory().available
    if missing > available:
        raise OSError(f"{missing:,} bytes are needed and {available:,} are free")


def _aligned(offset: int) -> int:
    return -(-offset // _BOUNDARY) * _BOUNDARY
