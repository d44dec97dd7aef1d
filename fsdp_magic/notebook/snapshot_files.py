"""KERNEL: the memory that holds the ranks' snapshots, which outlives the engines that write it.

Files without a name, in memory, that the kernel holds open: engines open them by a path of the
kernel's, and nothing is left of them once it closes them or ends. They are empty until a run asks
for snapshots.
"""

from __future__ import annotations

import os

from fsdp_magic.core.snapshot_header import HEADER_BYTES, SnapshotHeader

_EACH = 2
"""Written in turn, so that a whole snapshot is always there."""


class SnapshotFiles:
    """Two files for each rank.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._files = [
            [os.memfd_create(f"fsdp_magic-snapshot-{rank}-{number}") for number in range(_EACH)]
            for rank in range(world_size)
        ]

    def paths(self, rank: int) -> tuple[str, ...]:
        """Return where an engine finds the files of its rank."""
        if not self._files:
            return ()
        return tuple(f"/proc/{os.getpid()}/fd/{file}" for file in self._files[rank])

    @property
    def used_bytes(self) -> int:
        """Memory that they take."""
        return sum(os.fstat(file).st_size for files in self._files for file in files)

    @property
    def newest_step(self) -> int | None:
        """The step of the newest snapshot that all ranks have; None: there is none."""
        ranks = [
            {header.number: header.step for header in map(_header, files)} for files in self._files
        ]
        numbers = set.intersection(*map(set, ranks)) - {0} if ranks else set()
        return ranks[0][max(numbers)] if numbers else None

    def forget(self) -> None:
        """Drop every snapshot, and give their memory back; between cells only."""
        for file in (file for each in self._files for file in each):
            os.ftruncate(file, 0)

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        files, self._files = self._files, []
        for file in (file for each in files for file in each):
            os.close(file)


def _header(file: int) -> SnapshotHeader:
    return SnapshotHeader.unpack(os.pread(file, HEADER_BYTES, 0))
