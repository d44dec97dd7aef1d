"""The layout of the page that the kernel and the engines of one host share; pure.

The page is a few kilobytes of memory, mapped by every process from one file that only its owner
can open. It carries flags that must arrive while the other side is busy: that the transports of
a generation were given up, that a run should stop, and each rank's vote.

Every entry is one aligned machine word and is written by one store, so a reader sees the old
word or the new one and never a mixture. A vote packs its number, its flags and a count into one
word for that reason. Each rank owns two vote slots and alternates between them: it can only
overwrite a slot two votes later, when everybody has read it.

Written in bytes from the start: word 0, the newest generation whose transports were given up;
word 1, the run that should stop; word 2, how often the ranks were asked where they are; then
64 bytes (one cache line) for each rank: its two vote slots, then the newest generation in which it
sends nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass

WORD_BYTES = 8
HEADER_WORDS = 8
RANK_WORDS = 8
_QUIET_WORD = 2
_IDLE = 1 << 62
"""Beyond every generation: a rank that runs no cell sends nothing in any."""
NUMBER_BITS, FLAG_BITS, COUNT_BITS = 16, 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One rank's vote.

    Attributes:
        number: which vote it belongs to, modulo 2**16.
        flags: bits, or-ed over the ranks.
        count: added up over the ranks; below 2**32.
    """

    number: int
    flags: int
    count: int

    def word(self) -> int:
        """Pack into one machine word."""
        if not 0 <= self.count < 1 << COUNT_BITS:
            raise OverflowError(f"a vote counts to 2**{COUNT_BITS}; {self.count} does not fit")
        return (self.number << (FLAG_BITS + COUNT_BITS)) | (self.flags << COUNT_BITS) | self.count

    @classmethod
    def of(cls, word: int) -> Ballot:
        """Unpack a machine word."""
        return cls(
            number=word >> (FLAG_BITS + COUNT_BITS),
            flags=(word >> COUNT_BITS) & ((1 << FLAG_BITS) - 1),
            count=word & ((1 << COUNT_BITS) - 1),
        )


def page_bytes(world_size: int) -> int:
    """Return the size of the page of a world."""
    return WORD_BYTES * (HEADER_WORDS + RANK_WORDS * world_size)


class Page:
    """Named access to the words of a mapped page.

    Args:
        words: the mapped memory as a memoryview of format ``Q`` (native 8-byte words).
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @property
    def released_generation(self) -> int:
        """The newest generation whose transports were given up; 0: none."""
        return int(self._words[0])

    def release(self, generation: int) -> None:
        """Give up the transports of a generation; every rank lets go of them."""
        if generation > self.released_generation:
            self._words[0] = generation

    @property
    def stopping_run(self) -> int:
        """The run that should stop at its next step boundary; 0: none."""
        return int(self._words[1])

    def stop(self, run_id: int) -> None:
        """Ask a run to stop at its next step boundary."""
        self._words[1] = run_id

    @property
    def question(self) -> int:
        """How often the kernel has asked the ranks where they are."""
        return int(self._words[2])

    def ask_where(self) -> None:
        """Ask the ranks that run a cell to say where they are."""
        self._words[2] += 1

    def note_quiet(self, rank: int, generation: int) -> None:
        """Note that a rank sends nothing any more over the transports of a generation."""
        word = HEADER_WORDS + RANK_WORDS * rank + _QUIET_WORD
        self._words[word] = max(generation, self._words[word])

    def note_idle(self, rank: int) -> None:
        """Note that a rank runs no cell, or is dead."""
        self.note_quiet(rank, _IDLE)

    def note_busy(self, rank: int) -> None:
        """Note that a rank runs a cell."""
        self._words[HEADER_WORDS + RANK_WORDS * rank + _QUIET_WORD] = 0

    def all_quiet(self, generation: int) -> bool:
        """Return whether no rank sends anything over the transports of a generation any more."""
        words = self._words[HEADER_WORDS + _QUIET_WORD :: RANK_WORDS]
        return all(word >= generation for word in words.tolist())

    def cast(self, rank: int, ballot: Ballot) -> None:
        """Publish a rank's vote."""
        self._words[self._slot(rank, ballot.number)] = ballot.word()

    def ballot(self, rank: int, number: int) -> Ballot:
        """Return what stands in a rank's slot for a vote; its number tells whether it came."""
        return Ballot.of(int(self._words[self._slot(rank, number)]))

    def has_voted(self, rank: int, number: int) -> bool:
        """Return whether a rank's ballot of a vote is there."""
        word = self._words[self._slot(rank, number)]
        return bool(word >> (FLAG_BITS + COUNT_BITS) == number)

    def clear_ballots(self, rank: int) -> None:
        """Forget a rank's votes, so that both sides of a recovery count from the start."""
        for parity in (0, 1):
            self._words[self._slot(rank, parity)] = 0

    @staticmethod
    def _slot(rank: int, number: int) -> int:
        return HEADER_WORDS + RANK_WORDS * rank + number % 2
