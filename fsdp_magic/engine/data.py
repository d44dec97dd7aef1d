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

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fsdp_magic.core.batch import GlobalBatch
from fsdp_magic.core.errors import FsdpError

DEFAULT_MICRO_BATCH_SIZE = 8
Collate = Callable[[list[Any]], Any]


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
    """

    epoch: int = 0
    samples: int = 0
    key: int = 0
    iterator: Iterator[Any] | None = field(default=None, repr=False)


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
        self._indexed = _indexed(source, shuffle=shuffle, collate=collate)
        if self._indexed is None:
            self._refuse_for_ready_batches(shuffle=shuffle, collate=collate)
        self.micro_batch_size = None if self._indexed is None else batch.micro_batch_size
        self.steps_per_epoch = self._count_steps()
        if position.key != id(source):
            position.epoch, position.samples, position.iterator = 0, 0, None
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

    def rewind(self) -> None:
        """Forget what was taken and not committed."""
        self._pending = None

    # -- map-style

    def _take_indexed(self, data: _Indexed) -> list[Any] | None:
        position = self._position
        assert self.steps_per_epoch is not None
        if position.samples + self.batch.global_size > self._used_samples(data):
            position.epoch, position.samples, self._pending = position.epoch + 1, 0, None
        if self._pending is None:
            self._pending = data.read(self._epoch_indices(data))
        return [next(self._pending) for _ in range(self.batch.accumulate)]

    def _used_samples(self, data: _Indexed) -> int:
        return data.length // self.batch.global_size * self.batch.global_size

    def _epoch_indices(self, data: _Indexed) -> list[list[int]]:
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
        if position.iterator is None:
            position.iterator = self._ready_iterator()
        taken = _first(position.iterator, self.batch.accumulate)
        begins_anew = iter(self._source) is not self._source and position.samples > 0
        if taken is None and self._goes_round and begins_anew:
            position.epoch, position.samples = position.epoch + 1, 0
            position.iterator = self._ready_iterator()
            taken = _first(position.iterator, self.batch.accumulate)
        return taken

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed:
    """Data whose samples are found by index.

    Attributes:
        length: number of samples in an epoch.
        order: (seed, epoch) -> the indices of an epoch, the same on all ranks.
        read: micro-batches of indices -> collated batches.
    """

    length: int
    order: Callable[[int, int], list[int]]
    read: Callable[[list[list[int]]], Iterator[Any]]


def micro_batch_size_of(source: Any, asked: int | None) -> int | None:
    """Return the micro-batch size: as asked, a loader's own, or the default; None: not ours."""
    if isinstance(source, DataLoader):
        return asked if asked is not None else source.batch_size
    if _is_map_style(source):
        return asked if asked is not None else DEFAULT_MICRO_BATCH_SIZE
    if asked is not None:
        raise FsdpError(
            f"--micro-batch-size {asked} cannot change batches that the data yields ready-made; "
            "leave it out"
        )
    return None


def sample_count(batch: Any) -> int | None:
    """Return the number of samples of a batch: dim 0 of its tensors, if they agree."""
    lengths = {len(tensor) for tensor in _tensors(batch) if tensor.ndim > 0}
    return lengths.pop() if len(lengths) == 1 else None


def token_count(batch: Any) -> int | None:
    """Return the number of tokens of a batch that says its ``input_ids``; None otherwise."""
    if not isinstance(batch, Mapping):
        return None
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) else None


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch with every tensor in it on a device; its structure is kept."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if type(value) is dict else _rebuilt(value, moved)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value


def _rebuilt(value: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """Return a mapping of the same class (a BatchEncoding, say); a dict if it cannot be made."""
    try:
        return type(value)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _indexed(source: Any, *, shuffle: bool, collate: Collate | None) -> _Indexed | None:
    """Return map-style data as such; None for ready batches."""
    if isinstance(source, DataLoader):
        return _indexed_loader(source, shuffle=shuffle, collate=collate)
    if isinstance(source, IterableDataset):
        raise FsdpError(
            "an IterableDataset yields samples one by one; wrap it: DataLoader(dataset, "
            "batch_size=8)"
        )
    if _is_map_style(source):
        collate = collate or default_collate
        return _Indexed(
            length=len(source),
            order=lambda seed, epoch: _order(len(source), seed, epoch, shuffle=shuffle),
            read=lambda batches: (collate([source[i] for i in batch]) for batch in batches),
        )
    if isinstance(source, Iterable):
        return None
    raise FsdpError(
        f"--data is a {type(source).__name__}, which holds no batches; it takes a data set, a "
        "list, a DataLoader or an iterable of batches"
    )


def _indexed_loader(
    loader: DataLoader[Any], *, shuffle: bool, collate: Collate | None
) -> _Indexed | None:
    """Return a loader's data with its workers kept; None if the loader makes whole batches."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    if type(loader.batch_sampler) is not BatchSampler:  # the person's own
        return None
    length = len(loader.sampler)  # type: ignore[arg-type]  # samplers of map-style data have one

    def order(seed: int, epoch: int) -> list[int]:
        return _sampler_order(loader, seed, epoch, shuffle=shuffle)

    def read(batches: list[list[int]]) -> Iterator[Any]:
        return iter(
            DataLoader(
                loader.dataset,
                batch_sampler=batches,
                collate_fn=collate or loader.collate_fn,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                prefetch_factor=loader.prefetch_factor,
            )
        )

    return _Indexed(length=length, order=order, read=read)


def _sampler_order(
    loader: DataLoader[Any], seed: int, epoch: int, *, shuffle: bool
) -> list[int]:
    """Return the order a loader's sampler gives, the same on all ranks."""
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return _order(len(sampler), seed, epoch, shuffle=shuffle)
    if isinstance(sampler, SequentialSampler):
        return list(range(len(sampler)))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_epoch_seed(seed, epoch))
        return [int(index) for index in sampler]


def _order(length: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(_epoch_seed(seed, epoch))
    return [int(i) for i in torch.randperm(length, generator=generator).tolist()]


def _epoch_seed(seed: int, epoch: int) -> int:
    return (seed * 1_000_003 + epoch) % 2**63


def _is_map_style(source: Any) -> bool:
    known = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return known and not isinstance(source, (Mapping, str, bytes, DataLoader))


def _every(batches: Iterator[Any], rank: int, ranks: int) -> Iterator[Any]:
    """Yield every ``ranks``-th batch from the ``rank``-th on; all ranks get equally many."""
    while (together := _first(batches, ranks)) is not None:
        yield together[rank]


def _first(batches: Iterator[Any], count: int) -> list[Any] | None:
    """Return the next batches; None if fewer are left."""
    taken = [batch for _, batch in zip(range(count), batches)]
    return taken if len(taken) == count else None

