"""KERNEL: the line that an engine is in while C code holds its interpreter lock.

Such an engine answers nothing, but a signal reaches it: its handler, in C, writes the stack of the
main thread to a file of the cluster's directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_magic.core.whereabouts import STACK_SIGNAL, stack_file

_AGAIN_SECONDS = 2.0
_FRAME = re.compile(r'File "(<%%.*)", line (\d+)')


@dataclass(slots=True, kw_only=True)
class Stacks:
    """Asks engines for their stacks.

    Attributes:
        directory: of the cluster.
        pids: of the engines, by rank.
    """

    directory: Path
    pids: Mapping[int, int]
    _asked_at: dict[int, float] = field(default_factory=dict)

    def line(self, rank: int, now: float) -> int | None:
        """Return the line of the cell that a rank was in when it was last asked; None: not known.

        It is asked when it is time, and answers later.
        """
        if now - self._asked_at.get(rank, float("-inf")) < _AGAIN_SECONDS:
            return self._read(rank)
        known = self._read(rank) if rank in self._asked_at else None
        self._asked_at[rank] = now
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], STACK_SIGNAL)
        return known

    def _read(self, rank: int) -> int | None:
        try:
            text = stack_file(self.directory, rank).read_text(errors="replace")
        except OSError:  # it has not joined yet
            return None
        newest = text.rpartition("most recent call first")[2]
        frames = _FRAME.findall(newest)
        # the outermost cell is the one that runs; a function of it may be of an earlier one
        return next((int(line) for file, line in frames if file == frames[-1][0]), None)
