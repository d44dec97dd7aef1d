"""ENGINE: the collectives of a group, compared over its ranks before the transport sees them.

Gloo ends the process when two ranks issue different collectives, or mixes their data where the
sizes agree. So each rank writes every collective, as a number in sequence and a checksum of what
it is, into memory that all ranks of the group share, and then looks at what the others have
written under the same number: whoever comes second sees a difference, before it sends anything.

Only what must be equal is compared: sizes not where torch lets each rank have its own
(``all_to_all``), and nothing of point-to-point messages, which come in no common order.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_SLOTS = 64
"""Collectives by which one rank may be ahead of another and still be compared with it."""
_HEADER_WORDS, _WORD_BYTES = 8, 8
_SEQUENCE = 0xFFFFFFFF
_MOST_SIGNATURES = 4096


class DivergedError(Exception):
    """Raised on the rank that sees it: another issued something else in its place.

    Attributes:
        issued: this rank's collective, as text.
        peer: the other rank; in the group, until the group makes it one of the world.
    """

    def __init__(self, issued: str, *, peer: int) -> None:
        super().__init__(f"the ranks diverged: this one {issued}, another something else")
        self.issued = issued
        self.peer = peer


class Collective(NamedTuple):
    """What must be equal on all ranks about one collective.

    Attributes:
        call: name of torch's method.
        unit: the FSDP unit that it is for, or what a person called: ``fsdp.mean``; empty: none.
        numbers: how many it moves; -1: each rank may have its own.
        dtype: of its first tensor.
        operation: number of the reduction; 0: a sum, or none.
        root: rank in the group; 0 where there is none.
    """

    call: str
    unit: str = ""
    numbers: int = -1
    dtype: torch.dtype | None = None
    operation: int = 0
    root: int = 0

    @property
    def text(self) -> str:
        """What a person reads."""
        if self.unit.startswith(_IN_CELLS):
            return f"calls {self.unit}"
        verb = _VERBS.get(self.call)
        if self.unit and verb is not None:
            return f"{verb} `{self.unit}`"
        name = f"calls {_NAMES.get(self.call, self.call)}"
        if self.dtype is None:
            return name
        if self.operation:
            name += f" ({dist.ReduceOp.RedOpType(self.operation).name})"
        if self.root:
            name += f" (rank {self.root} of the group)"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{name} of {kind}" if self.numbers < 0 else f"{name} of {self.numbers:,} {kind}"


_IN_CELLS = "fsdp."
_VERBS = {
    "_allgather_base": "gathers",
    "_reduce_scatter_base": "reduces the gradients of",
    "allreduce": "adds up the gradients of",
}
_NAMES = {
    # torch's method -> the function of torch.distributed that a person calls
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
}
_SIZED_BY = {
    # method -> which of its arguments has as many numbers on every rank
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "allgather": 0,
    "allgather_coalesced": 0,
    "_allgather_base": 0,
    "reduce": 0,
    "reduce_scatter": 1,
    "_reduce_scatter_base": 1,
    "broadcast": 0,
    "gather": 1,
    "scatter": 0,
}


class Units(threading.local):
    """Which FSDP unit the collectives of this moment are for, in each thread.

    A checkpoint may be saved in another thread meanwhile, with collectives of its own.
    """

    def __init__(self) -> None:
        self.name = ""

    def naming(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose collectives are those of a unit, or of what a person called."""

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            outer, self.name = self.name, name
            try:
                return function(*args, **kwargs)
            finally:
                self.name = outer

        return named


UNITS = Units()
"""Of this process."""


def collective(call: str, args: tuple[Any, ...]) -> Collective:
    """Return what a call of a process group's method is."""
    sized = _SIZED_BY.get(call)
    counted = args[sized] if sized is not None and sized < len(args) else None
    options = args[-1] if args else None
    reduction = getattr(options, "reduceOp", None)
    return Collective(
        call,
        UNITS.name,
        -1 if counted is None else _numbers(counted),
        _dtype(args[0] if counted is None and args else counted),
        0 if reduction is None else int(reduction.op),
        getattr(options, "rootRank", 0),
    )


def _numbers(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_numbers, value)) if isinstance(value, (list, tuple)) else 0


def _dtype(value: Any) -> torch.dtype | None:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value.dtype if isinstance(value, torch.Tensor) else None


class CollectiveLog:
    """What the ranks of one group have issued, in memory that they share.

    Words: a header, whose first word is the number at which ranks diverged; then for each slot
    one word a rank. A word is written by one store, so a reader sees the old or the new one. A
    rank that reads just before another's word arrives leaves the finding to that other.

    Args:
        path: a file of the right size, made by ``new_file``; the same for all ranks.
        rank, size: in the group.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), _bytes(size))).cast("Q")
        self._rank = rank
        self._size = size
        self._recent: list[Collective | None] = [None] * _SLOTS
        self._signatures: dict[Collective, int] = {}
        self._sequence = 0
        self.issued_at = 0.0

    @staticmethod
    def new_file(path: Path, size: int) -> None:
        """Make the file of a group, for its owner only."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, _bytes(size))
        finally:
            os.close(descriptor)

    def note(self, issued: Collective) -> None:
        """Note a collective that is about to be issued.

        Raises:
            DivergedError: if another rank issued something else in its place.
        """
        signature = self._signatures.get(issued)
        if signature is None:
            signature = self._remember(issued)
        # number 0 is what an empty slot holds, so it is never used
        self._sequence = sequence = self._sequence % _SEQUENCE + 1
        self._recent[sequence % _SLOTS] = issued
        self.issued_at = time.monotonic()
        word = sequence << 32 | signature
        start = self._row(sequence)
        self._words[start + self._rank] = word
        for peer, other in enumerate(self._words[start : start + self._size].tolist()):
            if other != word and other >> 32 == sequence:
                self._words[0] = sequence
                raise DivergedError(issued.text, peer=peer)

    def take_back(self) -> None:
        """Forget the newest collective: it was refused before anything was sent."""
        self._words[self._row(self._sequence) + self._rank] = 0
        self._sequence -= 1

    @property
    def newest(self) -> Collective | None:
        """What this rank issued last."""
        return self._recent[self._sequence % _SLOTS]

    @property
    def diverged(self) -> Collective | None:
        """What this rank issued where the ranks diverged; None: they have not."""
        sequence = int(self._words[0])
        if not sequence or (self._sequence - sequence) & _SEQUENCE >= _SLOTS:
            return None  # also: this rank has not come there
        return self._recent[sequence % _SLOTS]

    def missing(self) -> tuple[int, ...]:
        """Return the ranks of the group that have not issued this rank's newest collective."""
        start = self._row(self._sequence)
        row = self._words[start : start + self._size].tolist()
        # one that is ahead has used the slot again
        return tuple(
            peer
            for peer, word in enumerate(row)
            if ((word >> 32) - self._sequence) & _SEQUENCE > _SEQUENCE // 2
        )

    def _row(self, sequence: int) -> int:
        return _HEADER_WORDS + sequence % _SLOTS * self._size

    def _remember(self, issued: Collective) -> int:
        if len(self._signatures) >= _MOST_SIGNATURES:  # of sizes that differ each time
            self._signatures.clear()
        signature = self._signatures[issued] = zlib.crc32(repr(tuple(issued)).encode())
        return signature


def _bytes(size: int) -> int:
    return _WORD_BYTES * (_HEADER_WORDS + _SLOTS * size)
