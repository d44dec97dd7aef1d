"""Bytes on one rank over time, for any micro-batch size; pure.

An overlay writes what a rank takes and gives back, in the order in which it happens. Sizes are
polynomials in the micro-batch size, so peak, parts and timeline of any size come from one ledger.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import accumulate
from typing import NamedTuple

from fsdp_magic.core.planning.step_trace import Kind, Size

Key = tuple[Hashable, ...]
_OF_TRACE = ("traced", "standing", "optimizer")
Stream = int
"""Streams of CUDA have memory of their own; 0 computes."""


class Entry(NamedTuple):
    """Memory is taken, or given back (``taken`` false).

    A key is a tuple; what an overlay adds has keys that begin with the words for it.
    """

    key: Key
    taken: bool
    size: Size
    kind: Kind
    place: str
    stream: Stream

    @property
    def term(self) -> str:
        """What it is, in words: ``all-gather buffer``; of what was traced, its kind."""
        return self.kind if self.key[0] in _OF_TRACE else str(self.key[0])


class Phase(NamedTuple):
    """From which entry on a step is in a phase: ``step 1: forward`` and the like."""

    entry: int
    name: str


class Ledger:
    """What a rank takes and gives back.

    Attributes:
        entries: in order.
        phases: in order.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.phases: list[Phase] = []
        self._live: dict[Key, Entry] = {}

    def take(
        self, key: Key, size: Size | float, kind: Kind, *, place: str = "", stream: Stream = 0
    ) -> None:
        """Take memory under a key that is free."""
        assert key not in self._live, key
        entry = Entry(
            key, True, size if isinstance(size, Size) else Size(size), kind, place, stream
        )
        self._live[key] = entry
        self.entries.append(entry)

    def give_back(self, key: Key) -> None:
        """Give back what a key holds; nothing, if it holds none."""
        taken = self._live.pop(key, None)
        if taken is not None:
            self.entries.append(taken._replace(taken=False))

    def holds(self, key: Key) -> bool:
        """Return whether memory is held under a key."""
        return key in self._live

    def held(self, first: Hashable) -> list[Key]:
        """Return the keys, tuples that begin with something, under which memory is held."""
        return [key for key in self._live if key[0] == first]

    def enter(self, phase: str) -> None:
        """Note that a phase begins."""
        self.phases.append(Phase(len(self.entries), phase))

    def levels(self, micro_batch_size: int) -> list[float]:
        """Return the bytes held after each entry."""
        b = micro_batch_size
        return list(accumulate(_change(entry, b) for entry in self.entries))

    def peak(self, micro_batch_size: int) -> float:
        """Return the most bytes held at once."""
        return max(self.levels(micro_batch_size), default=0.0)

    def peak_entry(self, micro_batch_size: int) -> int:
        """Return the number of the entry after which most bytes are held, the first of them."""
        levels = self.levels(micro_batch_size)
        return max(range(len(levels)), key=levels.__getitem__, default=0)

    def phase_of(self, entry: int) -> str:
        """Return the name of the phase that an entry is in."""
        return phase_at(self.phases, entry)

    def live_after(self, entry: int) -> Iterator[Entry]:
        """Yield what is held after an entry."""
        live: dict[Key, Entry] = {}
        for each in self.entries[: entry + 1]:
            if each.taken:
                live[each.key] = each
            else:
                del live[each.key]
        yield from live.values()


def _change(entry: Entry, micro_batch_size: int) -> float:
    size = entry.size.at(micro_batch_size)
    return size if entry.taken else -size


def phase_at(phases: tuple[Phase, ...] | list[Phase], entry: int) -> str:
    """Return the phase that an entry is in; before the first one the model is built."""
    return next((phase.name for phase in reversed(phases) if phase.entry <= entry), "the model")
