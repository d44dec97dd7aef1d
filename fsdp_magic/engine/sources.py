"""ENGINE: what a person bound as data, as samples found by index.

Map-style data and most DataLoaders are; what yields ready batches is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from torch.utils.data.distributed import DistributedSampler

from fsdp_magic.core.errors import FsdpError

DEFAULT_MICRO_BATCH_SIZE = 8
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
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


def indexed(source: Any, *, shuffle: bool, collate: Collate | None) -> Indexed | None:
    """Return map-style data as such; None for ready batches."""
    if isinstance(source, DataLoader):
        return _loader(source, shuffle=shuffle, collate=collate)
    if isinstance(source, IterableDataset):
        raise FsdpError(
            "an IterableDataset yields samples one by one; wrap it: DataLoader(dataset, "
            "batch_size=8)"
        )
    if _is_map_style(source):
        collate = collate or default_collate
        return Indexed(
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


def _loader(loader: DataLoader[Any], *, shuffle: bool, collate: Collate | None) -> Indexed | None:
    """Return a loader's data with its workers kept; None if the loader makes whole batches."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    if type(loader.batch_sampler) is not BatchSampler:  # the person's own
        return None
    if isinstance(loader.sampler, DistributedSampler):
        raise FsdpError(
            "the DataLoader has a DistributedSampler, and %%fsdp_train cuts the data over the "
            "ranks itself; leave the sampler out: DataLoader(dataset, batch_size=8, shuffle=True)"
        )
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

    return Indexed(length=length, order=order, read=read)


def _sampler_order(loader: DataLoader[Any], seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """Return the order a loader's sampler gives, the same on all ranks."""
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and _takes_each_once(sampler):
        return _order(len(sampler), seed, epoch, shuffle=shuffle)
    if isinstance(sampler, SequentialSampler):
        return list(range(len(sampler)))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_epoch_seed(seed, epoch))
        return [int(index) for index in sampler]


def _takes_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and len(sampler) == len(sampler.data_source)


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
