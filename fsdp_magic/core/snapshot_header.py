"""How a file of snapshots begins, which engines write and the kernel reads; data only, pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_MAGIC = b"fsdpsnap"
_LAYOUT = struct.Struct("<8sQQQQ")

HEADER_BYTES = _LAYOUT.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """What is in a file of snapshots.

    Attributes:
        number: of the snapshot; 0: there is none that is whole.
        step: steps of training that it holds.
        index_bytes: length of the index.
        tensors_at: where tensors begin.
    """

    number: int = 0
    step: int = 0
    index_bytes: int = 0
    tensors_at: int = 0

    def pack(self) -> bytes:
        """Return the bytes that a file begins with."""
        return _LAYOUT.pack(_MAGIC, self.number, self.step, self.index_bytes, self.tensors_at)

    @classmethod
    def unpack(cls, raw: bytes) -> SnapshotHeader:
        """Return what the first bytes of a file say."""
        if len(raw) < HEADER_BYTES:
            return cls()
        magic, number, step, index_bytes, tensors_at = _LAYOUT.unpack(raw[:HEADER_BYTES])
        if magic != _MAGIC:
            return cls()
        return cls(number=number, step=step, index_bytes=index_bytes, tensors_at=tensors_at)
