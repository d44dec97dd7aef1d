"""ENGINE: one epoch of data that is read in its own order: a stream of samples, or ready batches.

Both are read through links (``engine/chain.py``), so that what a failed step took comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.chain import Link
from fsdp_magic.engine.cut import Cut, Step, place_in, refuse_for_ready
from fsdp_magic.engine.position import Cursor, Place
from fsdp_magic.engine.sources import Ready, Stream


class StreamReader:
    """Samples that come one by one: every rank reads all of them and takes its part."""

    full: int | None = None
    left: int | None = None

    def __init__(self, kind: Stream, cut: Cut, cursor: Cursor) -> None:
        if cut.tokens_per_batch is not None:
            raise FsdpError(
                f"--tokens-per-batch {cut.tokens_per_batch} sorts samples by length, and this "
                "data yields them one by one; use --micro-batch-size"
            )
        self._batch = cut.batch_of(kind)
        self._rank = cut.rank
        self._collate = cut.collate or kind.collate
        self._place = place_in(cursor, "samples")
        self._link = _Begun(cursor, lambda place: kind.begin(cut.seed, place.epoch))
        self.micro_batch_size: int | None = self._batch.micro_batch_size
        self.accumulate = self._batch.accumulate
        self.notes: list[str] = []

    def take(self) -> Step | None:
        """Return the next step; None if no whole one is left."""
        size = self._batch.global_size
        samples, rest = self._link.take(size, self._place)
        if len(samples) < size:
            self._note_rest(len(samples))
            return None
        self._place = replace(self._place, consumed=self._place.consumed + size, link=rest)
        batches = [
            self._collate(samples[start:end])
            for start, end in self._batch.micro_batch_slices(self._rank)
        ]
        return Step(batches=batches, after=self._place)

    def close(self) -> None:
        """End worker processes."""
        self._link.close()

    def _note_rest(self, rest: int) -> None:
        if self._place.consumed == 0:
            raise FsdpError(
                f"the data yields {rest} samples and one step takes {self._batch.text()}; lower "
                "--micro-batch-size or --accumulate"
            )
        if rest:
            self.notes.append(
                f"the last {rest} samples of an epoch do not fill a step and are left out"
            )


class ReadyReader:
    """Batches that are made already."""

    micro_batch_size: int | None = None

    def __init__(self, kind: Ready, cut: Cut, cursor: Cursor) -> None:
        refuse_for_ready(cut)
        rank, ranks = (cut.rank, cut.ranks) if kind.shared else (0, 1)
        self.accumulate = cut.accumulate
        self._ranks = ranks
        self._place = place_in(cursor, f"batches of every {ranks}" if ranks > 1 else "batches")
        if not kind.begins_anew and self._place.link is not None and self._place.link.broken:
            raise FsdpError(
                "the data raised while it was read, and an iterator cannot go on after that; "
                "bind it anew, or pass the function that makes it"
            )
        self._link = _Begun(cursor, lambda place: kind.begin(cut.seed, place.epoch, rank, ranks))
        self.full: int | None = _divided(kind.length, cut.accumulate * ranks)
        used = self._place.consumed * ranks
        remaining = None if kind.length is None else max(0, kind.length - used)
        self.left: int | None = _divided(remaining, cut.accumulate * ranks)
        self.notes: list[str] = []

    def take(self) -> Step | None:
        """Return the next step; None if no whole one is left."""
        batches, rest = self._link.take(self.accumulate, self._place)
        if len(batches) < self.accumulate:
            return None
        if self.left is not None:
            self.left -= 1
        self._place = replace(
            self._place, consumed=self._place.consumed + self.accumulate, link=rest
        )
        return Step(batches=batches, after=self._place)

    def close(self) -> None:
        """End worker processes."""
        self._link.close()


class _Begun:
    """The iterator of an epoch, begun when the first item is wanted.

    Args:
        cursor: told the place where it was begun.
        begin: place -> the place before the epoch's first item.
    """

    def __init__(self, cursor: Cursor, begin: Callable[[Place], Link]) -> None:
        self._cursor = cursor
        self._begin = begin
        self._latest: Link | None = None

    def take(self, count: int, place: Place) -> tuple[list[Any], Link]:
        """Return the next items from a place on, fewer at the end, and the link after them."""
        link = place.link or self._latest
        if link is None or link.broken:
            # begin, and pass over what was taken before
            link = self._begin(place).skip(place.consumed)
            self._cursor.begin(link=link)
        items, self._latest = link.take(count)
        return items, self._latest

    def close(self) -> None:
        """End the iterator if it has worker processes."""
        if self._latest is not None:
            self._latest.close()


def _divided(length: int | None, by: int) -> int | None:
    return None if length is None else length // by
