"""Where a rank is, as it tells the kernel: data only, and how it is asked; pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

WHERE_KEY = "fsdp_magic.where"
"""The key of where a rank is in an ipyparallel data message."""

STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
"""Lets an engine write its stack, also while C code holds the interpreter lock; only Linux has
engines, but plans are made elsewhere, too."""


def stack_file(directory: Path, rank: int) -> Path:
    """Return the file that a rank writes its stack to."""
    return directory / f"stack-{rank}.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where a rank is, or was when its cell ended.

    Attributes:
        line: of the cell; None: outside of it, between two runs of a training cell.
        source: that line; outside of it ``backward``, or nothing.
        inner: file and line of the person's own module that the cell is in; empty: none.
        doing: what it waits in: a collective, an agreement of ours, the data; empty: it computes.
        missing: ranks that it waits for.
        is_message: whether it waits for a message of one other rank.
        seconds: for how long.
    """

    line: int | None = None
    source: str = ""
    inner: str = ""
    doing: str = ""
    missing: tuple[int, ...] = ()
    is_message: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhereReport:
    """Where a rank is; published when the kernel asks. ``number`` is that of the question."""

    rank: int
    number: int
    where: Whereabouts
