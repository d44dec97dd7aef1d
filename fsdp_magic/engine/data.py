"""ENGINE: any data -> the micro-batches of this rank, step by step.

Map-style data (``__len__`` and ``__getitem__``) is ordered by one permutation of (seed, epoch),
the same on every rank. With G samples in a global batch, batch n is ``order[n*G : (n+1)*G]``;
rank r takes the r-th contiguous part of it and cuts that into micro-batches. An incomplete last
global batch is dropped. So ranks get disjoint samples, and a step holds the same samples on any
number of ranks and with any accumulation, as long as G is the same.

A ``DataLoader`` keeps its collate function, workers and sampler; the sampler is read alike on all
ranks and cut the same way. A loader over an iterable dataset, or with a batch sampler of its
own, yields ready batches: rank r takes every r-th. Any other iterable yields ready batches that
are taken as they are on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from fsdp_magic.core.batch import GlobalBatch
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.batches import sample_count, to_device
from fsdp_magic.engine.sources import Collate, Indexed, indexed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """What one rank takes in one step.

    Attributes:
        batches: one per micro-step, on the device.
        counts: samples of each; None where it has no number of samples.
        epoch: the epoch they belong to.
    """

    batches: list[Any]
    counts: list[int | None]
    epoch: int


@dataclass(slots=True, kw_only=True)
class Position:
    """Where the next step begins in the data.

    Attributes:
        epoch: full passes done.
        samples: global samples taken in this epoch (of ready batches: steps taken).
        key: identity of the data this is a position in.
        iterator: of ready batches, between runs.
        uncommitted: ready batches that were taken for a step that was not done.
    """

    epoch: int = 0
    samples: int = 0
    key: int = 0
    iterator: Iterator[Any] | None = field(default=None, repr=False)
    uncommitted: list[Any] | None = field(default=None, repr=False)


class Data:
    """The data of one run on one rank.

    Args:
        source: what a person bound.
        batch: how a global batch is cut.
        rank: this rank among the data-parallel ranks.
        seed: of the order.
        shuffle: whether map-style data is shuffled.
        collate: samples -> batch; None: the loader's own, or torch's default.
        goes_round: whether ready batches begin anew at their end.
        device: where batches go.
        position: where to begin; advanced by ``commit``.

    Attributes:
        steps_per_epoch: None if it is not known.
        micro_batch_size: None if batches come ready-made.
        notes: sentences a person should read.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch: GlobalBatch,
        rank: int,
        seed: int,
        shuffle: bool,
        collate: Collate | None,
        goes_round: bool,
        device: torch.device,
        position: Position,
    ) -> None:
        self._goes_round = goes_round
        self.batch = batch
        self._rank = rank
        self._seed = seed
        self._device = device
        self._position = position
        self.notes: list[str] = []
        self._source = source
        self._indexed = indexed(source, shuffle=shuffle, collate=collate)
        if self._indexed is None:
            self._refuse_for_ready_batches(shuffle=shuffle, collate=collate)
        self.micro_batch_size = None if self._indexed is None else batch.micro_batch_size
        self.steps_per_epoch = self._count_steps()
        if position.key != id(source):
            position.epoch, position.samples = 0, 0
            position.iterator = position.uncommitted = None
            position.key = id(source)
        self._pending: Iterator[Any] | None = None

    def take(self) -> StepBatches | None:
        """Return the next step's micro-batches; None if the data is at its end."""
        micro_batches = (
            self._take_ready() if self._indexed is None else self._take_indexed(self._indexed)
        )
        if micro_batches is None:
            return None
        moved = [to_device(micro_batch, self._device) for micro_batch in micro_batches]
        return StepBatches(
            batches=moved,
            counts=[sample_count(micro_batch) for micro_batch in moved],
            epoch=self._position.epoch,
        )

    def commit(self) -> None:
        """Count the step that was taken last; without this its batches come again."""
        self._position.samples += self.batch.global_size if self._indexed is not None else 1
        self._position.uncommitted = None

    # -- map-style

    def _take_indexed(self, data: Indexed) -> list[Any] | None:
        position = self._position
        assert self.steps_per_epoch is not None
        if position.samples + self.batch.global_size > self._used_samples(data):
            position.epoch, position.samples, self._pending = position.epoch + 1, 0, None
        if self._pending is None:
            self._pending = data.read(self._epoch_indices(data))
        return [next(self._pending) for _ in range(self.batch.accumulate)]

    def _used_samples(self, data: Indexed) -> int:
        return data.length // self.batch.global_size * self.batch.global_size

    def _epoch_indices(self, data: Indexed) -> list[list[int]]:
        """Return this rank's micro-batches of indices for what is left of the epoch."""
        order = data.order(self._seed, self._position.epoch)
        steps = range(self._position.samples, self._used_samples(data), self.batch.global_size)
        return [
            order[start + first : start + last]
            for start in steps
            for first, last in self.batch.micro_batch_slices(self._rank)
        ]

    # -- ready batches

    def _take_ready(self) -> list[Any] | None:
        """Take one ready batch per micro-step, beginning anew at the end if that is possible."""
        position = self._position
        taken = position.uncommitted
        if taken is None or len(taken) != self.batch.accumulate:
            taken = self._next_ready()
        if taken is None and self._can_begin_anew():
            had_any = position.samples > 0
            position.epoch, position.samples, position.iterator = position.epoch + 1, 0, None
            if self._goes_round and had_any:
                taken = self._next_ready()
        position.uncommitted = taken
        return taken

    def _next_ready(self) -> list[Any] | None:
        position = self._position
        if position.iterator is None:
            position.iterator = self._ready_iterator()
        return _first(position.iterator, self.batch.accumulate)

    def _can_begin_anew(self) -> bool:
        return isinstance(self._source, DataLoader) or iter(self._source) is not self._source

    def _ready_iterator(self) -> Iterator[Any]:
        if not isinstance(self._source, DataLoader):
            return iter(self._source)
        return _every(iter(self._source), self._rank, self.batch.data_parallel_size)

    def _refuse_for_ready_batches(self, *, shuffle: bool, collate: Collate | None) -> None:
        if collate is not None:
            raise FsdpError(
                "--collate is for samples, and this data yields ready batches; leave it out"
            )
        if not shuffle:
            raise FsdpError(
                "--no-shuffle is for samples, and this data yields ready batches in its own "
                "order; leave it out"
            )

    def _count_steps(self) -> int | None:
        if self._indexed is None:
            return self._count_ready_steps()
        steps = self._indexed.length // self.batch.global_size
        left = self._indexed.length % self.batch.global_size
        if steps == 0:
            raise FsdpError(
                f"the data has {self._indexed.length} samples and one step takes "
                f"{self.batch.text()}; lower --micro-batch-size or --accumulate"
            )
        if left:
            self.notes.append(
                f"an epoch is {steps} steps; its last {left} of {self._indexed.length} samples "
                "do not fill a step and are left out"
            )
        return steps

    def _count_ready_steps(self) -> int | None:
        try:
            length = len(self._source)
        except TypeError:
            return None
        shares = self.batch.data_parallel_size if isinstance(self._source, DataLoader) else 1
        return int(length // shares // self.batch.accumulate)


def _every(batches: Iterator[Any], rank: int, ranks: int) -> Iterator[Any]:
    """Yield every ``ranks``-th batch from the ``rank``-th on; all ranks get equally many."""
    while (together := _first(batches, ranks)) is not None:
        yield together[rank]


def _first(batches: Iterator[Any], count: int) -> list[Any] | None:
    """Return the next batches; None if fewer are left."""
    taken = [batch for _, batch in zip(range(count), batches)]
    return taken if len(taken) == count else None
