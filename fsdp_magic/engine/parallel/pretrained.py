"""ENGINE: checkpoints loaded by every rank and held once per host.

While a ``%%fsdp_model`` cell runs, ``safe_open`` (which ``from_pretrained`` and ``load_file``
read safetensors with) gives tensors that are the file itself, mapped privately. The ranks of a
host share its pages: it is read once, and no rank has a copy of what it only reads. Everything
else in the cell works as ever, since these are plain tensors; a page that is written becomes the
rank's own.

Each tensor has a mapping of its own, which goes with it. As a unit is sharded its mappings are
made anew, so that their pages are no longer held while the shards are filled. What is still mapped
when the cell is over (a small model that was not sharded, say) is copied, because a file that is
written again, by ``save_pretrained`` into the same folder, must not change it.

Weights that are converted as they are loaded (``dtype=`` other than the file's) are each rank's
own.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Of tensors that are mapped; others are read."""
_READERS = ("safetensors", "safetensors.torch", "transformers.modeling_utils")
"""Modules whose ``safe_open`` is replaced."""
_SMALLEST_BYTES = 64 * 1024
"""Below this a mapping costs more than it saves."""


@dataclass(slots=True)
class _Mapping:
    """Where in memory a part of a file is."""

    address: int
    size: int
    descriptor: int
    offset: int

    def make_anew(self) -> None:
        """Map the file again, so that no page of it is held until it is read."""
        _map_fixed(self.address, self.size, _FILE, self.descriptor, self.offset)

    def leave_file(self) -> None:
        """Become memory of this rank's own, with the same content."""
        content = ctypes.string_at(self.address, self.size)
        _map_fixed(self.address, self.size, _OWN, -1, 0)
        ctypes.memmove(self.address, content, self.size)


class MappedCheckpoints:
    """The tensors of files that are mapped on this rank."""

    def __init__(self) -> None:
        self._mappings: dict[int, _Mapping] = {}
        self._descriptors: dict[str, int] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let safetensors files be mapped inside; nothing is mapped any more afterwards."""
        import safetensors

        genuine = safetensors.safe_open

        def opened(filename: Any, framework: str, device: Any = "cpu", **more: Any) -> Any:
            file = genuine(filename, framework, device, **more)
            if framework not in ("pt", "torch", "pytorch") or str(device) != "cpu":
                return file
            return _MappedFile(file, os.fspath(filename), self)

        _replace_in_readers(genuine, opened)
        try:
            yield
        finally:
            _replace_in_readers(opened, genuine)
            self._end()

    def tensor(
        self, path: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Return a tensor that is a part of a file."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        descriptor, count = self._descriptors[path], math.prod(shape)
        before = offset % mmap.ALLOCATIONGRANULARITY
        size = before + count * dtype.itemsize
        try:
            mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=offset - before)
        except OSError as error:
            raise MemoryError(f"{size:,} bytes of {path} cannot be mapped ({error})") from None
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._mappings[address] = _Mapping(address, size, descriptor, offset - before)
        weakref.finalize(mapped, self._mappings.pop, address, None)
        flat = torch.frombuffer(mapped, dtype=dtype, offset=before, count=count)
        return flat.view(shape)

    def release(self, places: Iterable[tuple[nn.Parameter, nn.Module, str]]) -> None:
        """Let go of the pages of parameters that were replaced, each with its content elsewhere.

        Args:
            places: parameters from before, with where each stood.
        """
        if not self._mappings:
            return
        for old, owner, attribute in places:
            if owner._parameters.get(attribute) is old or type(old.data) is not torch.Tensor:
                continue
            start = old.data_ptr() - old.data_ptr() % mmap.ALLOCATIONGRANULARITY
            mapping = self._mappings.get(start)
            if mapping is not None:
                mapping.make_anew()

    def _end(self) -> None:
        for mapping in list(self._mappings.values()):
            mapping.leave_file()
        self._mappings.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


MAPPED = MappedCheckpoints()
"""The process has one, as it has one ``safe_open``."""


class _MappedFile:
    """An open safetensors file whose tensors are mapped."""

    def __init__(self, file: Any, path: str, mapped: MappedCheckpoints) -> None:
        self._file = file
        self._path = path
        self._mapped = mapped
        with open(path, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            self._header = json.loads(opened.read(length))
        self._begin = 8 + length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _MappedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)

    def get_slice(self, name: str) -> Any:
        """Return what reads a tensor when it is indexed."""
        return _MappedSlice(self, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file, mapped if that is worth it."""
        entry = self._header[name]
        dtype = _DTYPES.get(entry["dtype"])
        first, last = entry["data_offsets"]
        offset = self._begin + first
        if dtype is None or last - first < _SMALLEST_BYTES or offset % dtype.itemsize:
            tensor: torch.Tensor = self._file.get_tensor(name)
            return tensor
        return self._mapped.tensor(self._path, dtype, tuple(entry["shape"]), offset)

    def sliced(self, name: str) -> Any:
        """Return safetensors' own slice of a tensor."""
        return self._file.get_slice(name)


class _MappedSlice:
    """A tensor that is not read yet."""

    def __init__(self, file: _MappedFile, name: str) -> None:
        self._file = file
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file.sliced(self._name), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if index is Ellipsis:
            return self._file.get_tensor(self._name)
        part: torch.Tensor = self._file.sliced(self._name)[index]
        return part


def _replace_in_readers(old: Any, new: Any) -> None:
    for name in _READERS:
        module: Any = sys.modules.get(name)
        if module is not None and getattr(module, "safe_open", None) is old:
            module.safe_open = new


_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10
"""``MAP_FIXED`` of <sys/mman.h> on Linux, which Python's mmap does not name."""
_FILE = mmap.MAP_PRIVATE | _FIXED
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED


def _map_fixed(address: int, size: int, flags: int, descriptor: int, offset: int) -> None:
    """Put another mapping in the place of one that is there."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    if function(address, size, _PROTECTION, flags, descriptor, offset) != address:
        raise MemoryError(f"{size:,} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
