"""ENGINE: how a run cuts its data, and what one epoch of one source on one rank offers.

With G samples in a global batch, batch n is samples ``n*G : (n+1)*G`` of the epoch's order, or
of the stream; rank r takes the r-th contiguous part of it and cuts that into micro-batches. An
incomplete last global batch is dropped. So ranks get disjoint samples, and a step holds the same
samples on any number of ranks and with any accumulation, as long as G is the same.

Batches of so many tokens, and ready ones, are dealt as they are: a step takes ``accumulate`` of
them on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from fsdp_magic.core.batch import GlobalBatch, accumulation
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import order
from fsdp_magic.engine.collating import Collate
from fsdp_magic.engine.position import Cursor, Place
from fsdp_magic.engine.sources import Samples, Stream

_RANK_STRIDE = 7_919


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a run cuts its data, as it was asked.

    Attributes:
        rank: this rank among those that divide the data.
        ranks: how many divide it; 1 where every rank reads all of it.
        worker_rank: tells this rank's worker processes from those of others.
        micro_batch_size: None: a loader's own, or the default.
        accumulate: micro-batches per step.
        global_batch_size: sets ``accumulate``; None: it is given.
        tokens_per_batch: None: batches are cut by samples.
        seed: of the order.
        shuffle: whether samples found by index are shuffled.
        collate: samples -> batch; None: the loader's own, or the default.
    """

    rank: int
    ranks: int
    seed: int
    worker_rank: int = 0
    micro_batch_size: int | None = None
    accumulate: int = 1
    global_batch_size: int | None = None
    tokens_per_batch: int | None = None
    shuffle: bool = True
    collate: Collate | None = None

    def batch_of(self, kind: Samples | Stream) -> GlobalBatch:
        """Return how samples are cut.

        Raises:
            UsageError: if no accumulation makes the global batch that was asked for.
        """
        size = self.micro_batch_size or kind.micro_batch_size
        accumulate = self.accumulate
        if self.global_batch_size is not None:
            accumulate = accumulation(
                self.global_batch_size, micro_batch_size=size, data_parallel_size=self.ranks
            )
        return GlobalBatch(
            micro_batch_size=size, accumulate=accumulate, data_parallel_size=self.ranks
        )

    def worker_seed(self, epoch: int) -> int:
        """Return the seed of worker processes: ranks augment their samples differently."""
        return order.epoch_seed(self.seed, epoch) + self.worker_rank * _RANK_STRIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The micro-batches of one step, and the place after them."""

    batches: list[Any]
    after: Place


class Reader(Protocol):
    """One epoch on one rank, from a place on.

    Attributes:
        full: steps of a whole epoch; None: not known.
        left: steps of the epoch that are not taken yet; None: not known.
        micro_batch_size: None if batches have no common size.
        accumulate: micro-batches per step.
        notes: sentences a person should read.
    """

    full: int | None
    left: int | None
    micro_batch_size: int | None
    accumulate: int
    notes: list[str]

    def take(self) -> Step | None:
        """Return the next step; None if no whole one is left."""

    def close(self) -> None:
        """End worker processes."""


def place_in(cursor: Cursor, unit: str) -> Place:
    """Return a cursor's place; in another unit it means nothing: begin the next epoch then."""
    place = cursor.place
    if place.unit != unit:
        begun = place.consumed > 0
        cursor.place = Place(
            epoch=place.epoch + begun, unit=unit, made=None if begun else place.made
        )
    return cursor.place


def refuse_for_ready(cut: Cut) -> None:
    """Raise if anything was asked that only means something for samples.

    Raises:
        FsdpError: naming it.
    """
    if cut.micro_batch_size is not None:
        raise FsdpError(
            f"--micro-batch-size {cut.micro_batch_size} cannot change batches that the data "
            "yields ready-made; leave it out"
        )
    if cut.collate is not None:
        raise FsdpError(
            "--collate is for samples, and this data yields ready batches; leave it out"
        )
    if not cut.shuffle:
        raise FsdpError(
            "--no-shuffle is for samples, and this data yields ready batches in its own order; "
            "leave it out"
        )
    for flag, value in (
        ("--tokens-per-batch", cut.tokens_per_batch),
        ("--global-batch-size", cut.global_batch_size),
    ):
        if value is not None:
            raise FsdpError(
                f"{flag} {value} is for samples, and this data yields ready batches; use "
                "--accumulate"
            )
