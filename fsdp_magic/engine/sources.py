"""ENGINE: what a person bound as data, as one of three kinds.

``Samples`` are found by index: map-style data and most DataLoaders. A ``Stream`` yields samples
one by one: an IterableDataset. ``Ready`` yields batches that are made already: any other
iterable, and a DataLoader that makes its own batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import order
from fsdp_magic.engine.chain import Link, chain
from fsdp_magic.engine.collating import Collate, collate_rows, collate_samples
from fsdp_magic.engine.loaders import IndexedLoader, ReadyLoader, StreamLoader

DEFAULT_MICRO_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Data whose samples are found by index.

    Attributes:
        dataset: what is indexed.
        length: number of samples in an epoch.
        micro_batch_size: a loader's own, or the default.
        order: (seed, epoch, shuffle) -> the indices of an epoch, the same on all ranks.
        read: (micro-batches of indices, collate, seed) -> batches.
        close: ends worker processes.
        lengths: tokens of each sample, once they were counted.
    """

    dataset: Any
    length: int
    micro_batch_size: int
    order: Callable[[int, int, bool], list[int]]
    read: Callable[[list[list[int]], Collate | None, int], Iterator[Any]]
    close: Callable[[], None]
    lengths: dict[int, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Data whose samples come one by one, the same on all ranks.

    Attributes:
        micro_batch_size: a loader's own, or the default.
        collate: samples -> batch, unless the person names another.
        begin: (seed, epoch) -> the place before the first sample.
    """

    micro_batch_size: int
    collate: Collate
    begin: Callable[[int, int], Link]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Data that comes in batches.

    Attributes:
        shared: whether ranks divide the batches; if not, each takes all that it has.
        length: batches of all ranks that share it; None: not known.
        begins_anew: False: it can be read once.
        begin: (seed, epoch, rank, ranks) -> the place before this rank's first batch.
    """

    shared: bool
    length: int | None
    begins_anew: bool
    begin: Callable[[int, int, int, int], Link]


Kind = Samples | Stream | Ready


def kind_of(source: Any) -> Kind:
    """Return what a person bound as one of the kinds.

    Raises:
        FsdpError: if it is none of them.
    """
    if isinstance(source, nn.Module):
        raise FsdpError("--data is a model; name the data that it reads")
    if isinstance(source, DataLoader):
        return _loader(source)
    if getattr(source, "_distributed", None) is not None:  # datasets.distributed
        raise FsdpError(
            "--data was split by split_dataset_by_node, and the extension cuts the data over the "
            "ranks itself; pass the whole data set"
        )
    if isinstance(source, IterableDataset) or is_huggingface(source, "IterableDataset"):
        return _stream(source)
    if isinstance(source, Mapping):
        raise _refused_mapping(source)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not _is_text(source):
        return _samples(source)
    if isinstance(source, Iterable) and not _is_text(source):
        return _ready(source)
    raise FsdpError(
        f"--data is a {type(source).__name__}, which holds no batches; it takes a data set, a "
        "list, a DataLoader, an iterable of batches, or a function that returns one of them"
    )


def is_huggingface(source: Any, name: str) -> bool:
    """Return whether an object is of a class of ``datasets``, without importing it."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(source, getattr(module, name))


def default_collate_for(dataset: Any) -> Collate:
    """Return what makes batches of a data set's samples where the person names nothing."""
    rows = is_huggingface(dataset, "Dataset") or is_huggingface(dataset, "IterableDataset")
    return collate_rows if rows else collate_samples


def _samples(dataset: Any) -> Samples:
    length = len(dataset)

    def read(batches: list[list[int]], collate: Collate | None, _seed: int) -> Iterator[Any]:
        made = collate or default_collate_for(dataset)
        return (made(_fetched(dataset, batch)) for batch in batches)

    def ordered(seed: int, epoch: int, shuffle: bool) -> list[int]:
        return order.permutation(length, seed, epoch) if shuffle else list(range(length))

    return Samples(
        dataset=dataset,
        length=length,
        micro_batch_size=DEFAULT_MICRO_BATCH_SIZE,
        order=ordered,
        read=read,
        close=_nothing,
    )


def _fetched(dataset: Any, indices: list[int]) -> list[Any]:
    """Return samples, all at once from data sets that can (torch's own protocol)."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def _stream(dataset: Any) -> Stream:
    def begin(seed: int, epoch: int) -> Link:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        alike = order.drawing_alike(seed, epoch)
        with alike.in_place():
            items = iter(dataset)
        return chain(items, randomness=alike)

    return Stream(
        micro_batch_size=DEFAULT_MICRO_BATCH_SIZE,
        collate=default_collate_for(dataset),
        begin=begin,
    )


def _ready(source: Any) -> Ready:
    def begin(_seed: int, epoch: int, _rank: int, _ranks: int) -> Link:
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        return chain(iter(source))

    return Ready(
        shared=False,
        length=_length(source),
        begins_anew=not isinstance(source, Iterator),
        begin=begin,
    )


def _loader(loader: DataLoader[Any]) -> Kind:
    """Return a loader's data with its workers kept, and its batches if it makes them itself."""
    collate = _loaders_collate(loader)
    iterable = isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or (
        not iterable and type(loader.batch_sampler) is not BatchSampler
    ):
        ready = ReadyLoader(loader)
        length = None if iterable else _length(loader)
        return Ready(shared=True, length=length, begins_anew=True, begin=ready.begin)
    if iterable:
        stream = StreamLoader(loader)
        return Stream(micro_batch_size=loader.batch_size, collate=collate, begin=stream.begin)
    if isinstance(loader.sampler, DistributedSampler):
        raise FsdpError(
            "the DataLoader has a DistributedSampler, and the extension cuts the data over the "
            "ranks itself; leave the sampler out: DataLoader(dataset, batch_size=8, shuffle=True)"
        )
    indexed = IndexedLoader(loader, collate)
    return Samples(
        dataset=loader.dataset,
        length=len(loader.sampler),  # type: ignore[arg-type]  # of map-style data: has one
        micro_batch_size=loader.batch_size,
        order=lambda seed, epoch, shuffle: order.sampler_order(
            loader.sampler, seed, epoch, shuffle=shuffle
        ),
        read=indexed.read,
        close=indexed.close,
    )


def _loaders_collate(loader: DataLoader[Any]) -> Collate:
    own: Collate = loader.collate_fn
    return default_collate_for(loader.dataset) if own is default_collate else own


def _refused_mapping(source: Mapping[Any, Any]) -> FsdpError:
    key = next(iter(source), "train")
    quoted = f'"{key}"' if isinstance(key, str) else repr(key)
    return FsdpError(
        f"--data is a {type(source).__name__}, whose values may be data; name one of them: "
        f"--data NAME[{quoted}]"
    )


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


def _is_text(source: Any) -> bool:
    return isinstance(source, (str, bytes, type))


def _nothing() -> None:
    """Need no end."""
