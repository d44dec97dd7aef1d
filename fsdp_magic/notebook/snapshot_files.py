"""KERNEL: the memory that holds the ranks' snapshots, which outlives the engines that write it.

Files without a name, in memory, that the kernel holds open: engines open them by a path of the
kernel's, and nothing is left of them once it closes them or ends. They are empty until a run asks
for snapshots.
"""

from __future__ import annotations

import os

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

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        files, self._files = self._files, []
        for file in (file for each in files for file in each):
            os.close(file)
