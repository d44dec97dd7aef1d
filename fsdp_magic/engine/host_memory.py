"""ENGINE: tensors kept in host memory: one copy of whole ones per host, and parked storages.

Both lie in shared mappings, which no allocator and no ``--memory-limit`` counts: what is kept
there takes nothing from the device, also where the device is a CPU.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from fsdp_magic.engine.world import World

_ALIGNMENT = 64
_SMALL_BYTES = 64 * 1024


class ParkedStorages:
    """The content of storages while they are empty, so that their memory is free.

    Every tensor, parameter and view stays the object that it is; none may be used meanwhile.

    Args:
        tensors: of whose storages each is parked once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}
        # one that lies in a mapped file, say, is nobody's to resize, and no memory of the device
        self._storages = [s for s in storages.values() if s.nbytes() and s.resizable()]
        self._copies: list[torch.Tensor] = []
        for storage in self._storages:
            copy = shared_bytes(storage.nbytes())
            copy.copy_(_bytes_of(storage))
            self._copies.append(copy)

    def empty(self) -> None:
        """Free the memory of the storages; their content is kept here."""
        for storage in self._storages:
            storage.resize_(0)

    def fill(self) -> None:
        """Have the storages as they were."""
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
        self._storages, self._copies = [], []


class WholeTensors:
    """Whole tensors by key, one copy of each per host.

    Args:
        shapes: of the tensors, with dtype, by key; the same on every rank.
        world: the ranks.
    """

    def __init__(self, shapes: Mapping[Any, tuple[torch.Size, torch.dtype]], world: World) -> None:
        """Map the memory.

        Collective: every rank must make its own.
        """
        self._offsets: dict[Any, int] = {}
        self._shapes = dict(shapes)
        size = 0
        for key, (shape, dtype) in shapes.items():
            self._offsets[key] = size
            size += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.is_writer = world.request.local_rank == 0
        self._memory = _mapped_on_host(max(size, 1), world)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Return a tensor of the shared memory; only the host's first rank may write into it."""
        shape, dtype = self._shapes[key]
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        offset, count = self._offsets[key], shape.numel()
        return torch.frombuffer(self._memory, dtype=dtype, offset=offset, count=count).view(shape)


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that takes nothing from its device, nor from a limit."""
    if tensor.nbytes < _SMALL_BYTES:
        return tensor.detach().to("cpu", copy=True)
    kept = shared_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return kept.copy_(tensor.detach())


def shared_bytes(size: int) -> torch.Tensor:
    """Return so many bytes of memory that neither malloc nor a limit of it counts."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _mapped_on_host(size: int, world: World) -> mmap.mmap:
    """Map memory that all ranks of this host share; it is gone when none maps it any more.

    Collective: every rank must call this.
    """
    host = (socket.gethostname(), world.request.directory)
    descriptor: int | None = None
    error: OSError | None = None
    if world.request.local_rank == 0:
        with suppress(OSError):
            descriptor = os.memfd_create("fsdp_magic", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
    path = None if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor}"
    said: list[Any] = [None] * world.world_size
    dist.all_gather_object(said, (host, path))
    try:
        path = next((theirs for at, theirs in said if at == host and theirs is not None), None)
        if path is None:
            raise OSError(f"no rank of {host[0]} could make {size:,} bytes of shared memory")
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as failure:
        error = failure
    dist.barrier()  # all have opened it
    if descriptor is not None:
        os.close(descriptor)
    if error is not None:
        raise error
    return mapped


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
