"""ENGINE: how ranks agree, on the host, without a message.

A vote is a few bits and a count. Bits are or-ed and counts added up over the ranks. Ranks of one
host vote on the shared page: publish your word, read the others' until all have come. It costs
well under a microsecond beyond the wait for the slowest rank, and the device is not involved.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.core.page import NUMBER_BITS, Ballot, Page
from fsdp_magic.engine.interrupts import ReleasedByPeerError

_YIELD_SECONDS = 50e-6
_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 100e-6, 1e-3
_SLEEP_PART = 1 / 16
"""Of the time that a rank has waited: so much longer it may take than it must."""


class Flag(enum.IntFlag):
    """What a rank can say in a vote."""

    NONE = 0
    STOP = 1
    """The person wants the run to stop here."""
    NO_BATCH = 2
    """This rank's data is at its end, or it has taken all its steps."""
    UNCOUNTED = 4
    """This rank's batches have no number of samples."""
    FINISH = 8
    """The cell wants the run to end here, as done."""
    NEW_EPOCH = 16
    """This rank's next batches begin a new epoch."""
    MISSING = 32
    """A trained parameter got no gradient on this rank."""
    NOT_FINITE = 64
    """This rank's loss is not finite."""
    NO_SNAPSHOT = 128
    """This rank could not write its snapshot."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """For whom a rank waits in a vote, and since when (``time.monotonic``)."""

    peer: int
    since: float


class Vote:
    """The votes of one generation of transports.

    Attributes:
        waiting: for whom it waits at this moment; for any thread to read.

    Args:
        page: the shared page.
        rank: this rank.
        world_size: number of ranks that vote.
        generation: of the transports; once it is given up, waiting ends.
    """

    def __init__(self, page: Page, rank: int, *, world_size: int, generation: int) -> None:
        self._page = page
        self._rank = rank
        self._others: Sequence[int] = [peer for peer in range(world_size) if peer != rank]
        self._generation = generation
        self._number = 0
        self.waiting: Waiting | None = None

    def take(self, flags: Flag = Flag.NONE, *, count: int = 0) -> tuple[Flag, int]:
        """Vote, and return what all ranks said together.

        Collective: every rank must call this.

        Args:
            flags: what this rank says.
            count: what this rank adds; below 2**32.

        Returns:
            The flags of all ranks or-ed, and their counts added up.

        Raises:
            ReleasedByPeerError: if a peer failed instead of voting.
        """
        if self._page.released_generation >= self._generation:
            raise ReleasedByPeerError  # a peer that gave up would not see this ballot
        # number 0 is what an empty slot holds, so it is never used
        self._number = self._number % ((1 << NUMBER_BITS) - 2) + 1
        self._page.cast(self._rank, Ballot(number=self._number, flags=int(flags), count=count))
        for peer in self._others:
            ballot = self._wait_for(peer)
            flags |= Flag(ballot.flags)
            count += ballot.count
        return flags, count

    def _wait_for(self, peer: int) -> Ballot:
        """Return a peer's ballot in the current vote once it is there."""
        if not self._page.has_voted(peer, self._number):
            now = time.monotonic()
            self.waiting = Waiting(peer, now)
            self._wait_until_voted(peer, now)
            self.waiting = None
        return self._page.ballot(peer, self._number)

    def _wait_until_voted(self, peer: int, since: float) -> None:
        """Wait, the less often awake the longer it takes: each time costs the processor some."""
        while not self._page.has_voted(peer, self._number):
            if self._page.released_generation >= self._generation:
                # one that voted and failed after it has gone on: this rank must do so too
                if self._page.has_voted(peer, self._number):
                    return
                raise ReleasedByPeerError
            waited = time.monotonic() - since
            if waited < _YIELD_SECONDS:
                os.sched_yield()
            else:  # ranks may outnumber the cores: leave them to those who still compute
                time.sleep(min(max(_SLEEP_SECONDS, waited * _SLEEP_PART), _LONGEST_SLEEP_SECONDS))
