"""ENGINE: the three ways to read a DataLoader: by index, as a stream, as ready batches.

Each keeps the person's workers, collate function and sampler, and gives this rank its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import order
from fsdp_magic.engine.chain import Link, chain
from fsdp_magic.engine.collating import Collate
from fsdp_magic.engine.workers import LoaderIterators, rebuilt


class _Batches:
    """The batch sampler of a rebuilt loader: what it yields is set for each epoch."""

    def __init__(self) -> None:
        self.batches: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class IndexedLoader:
    """A loader whose samples are found by index.

    Args:
        loader: the person's.
        collate: samples -> batch, unless a run names another.
    """

    def __init__(self, loader: DataLoader[Any], collate: Collate) -> None:
        self._loader = loader
        self._collate = collate
        self._plan = _Batches()
        self._iterators: LoaderIterators | None = None

    def read(self, batches: list[list[int]], collate: Collate | None, seed: int) -> Iterator[Any]:
        """Return the batches of an epoch, made by the workers if there are any."""
        self._plan.batches = batches
        if self._iterators is None:
            made = rebuilt(
                self._loader,
                seed=seed,
                batch_sampler=self._plan,
                collate_fn=collate or self._collate,
            )
            self._iterators = LoaderIterators(loader=made)
        return _in_one_line(self._iterators, seed)

    def close(self) -> None:
        """End the workers."""
        if self._iterators is not None:
            self._iterators.close()
            self._iterators = None


class StreamLoader:
    """A loader of an iterable data set, as samples.

    Args:
        loader: the person's.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def begin(self, seed: int, epoch: int) -> Link:
        """Return the place before the first sample of an epoch; all ranks see the same."""
        _tell_epoch(self._loader.dataset, epoch)
        epoch_seed = order.epoch_seed(seed, epoch)
        # whole batches as lists: one message between processes for each, not one for a sample
        made = rebuilt(
            self._loader, seed=epoch_seed, batch_size=self._loader.batch_size, collate_fn=list
        )
        return _alike(made, seed, epoch, samples=True)


class ReadyLoader:
    """A loader that makes whole batches: of its own batch sampler, or its data set does.

    Args:
        loader: the person's.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def begin(self, seed: int, epoch: int, rank: int, ranks: int) -> Link:
        """Return the place before this rank's first batch: it has every ``ranks``-th."""
        loader, epoch_seed = self._loader, order.epoch_seed(seed, epoch)
        _tell_epoch(loader.dataset, epoch)
        if isinstance(loader.dataset, IterableDataset):
            made = rebuilt(loader, seed=epoch_seed, batch_size=None)
            return _alike(made, seed, epoch, rank=rank, ranks=ranks)
        sampler = loader.sampler if loader.batch_size is None else None
        sampler = loader.batch_sampler if loader.batch_sampler is not None else sampler
        _tell_epoch(sampler, epoch)
        plan = _Batches()
        alike = order.drawing_alike(seed, epoch)
        # only this rank's batches are read; which these are is drawn alike on all
        plan.batches = every(_drawn(sampler, alike), rank, ranks)
        if loader.batch_sampler is not None:
            made = rebuilt(loader, seed=epoch_seed, batch_sampler=plan)
        else:
            made = rebuilt(loader, seed=epoch_seed, batch_size=None, sampler=plan)
        iterators = LoaderIterators(loader=made)
        return chain(iterators.begin(epoch_seed), on_close=_end_of(iterators))


def every(batches: Iterator[Any], rank: int, ranks: int) -> Iterator[Any]:
    """Yield every ``ranks``-th batch from the ``rank``-th on; all ranks get equally many."""
    while len(together := list(itertools.islice(batches, ranks))) == ranks:
        yield together[rank]


def _drawn(sampler: Any, alike: Any) -> Iterator[Any]:
    """Yield what a sampler yields, drawing alike on all ranks."""
    with alike.in_place():
        items = iter(sampler)
    while True:
        with alike.in_place():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _alike(
    loader: DataLoader[Any],
    seed: int,
    epoch: int,
    *,
    samples: bool = False,
    rank: int = 0,
    ranks: int = 1,
) -> Link:
    """Return the place before the first item of an iterable data set; ranks draw alike."""
    alike = order.drawing_alike(seed, epoch)
    iterators = LoaderIterators(loader=loader)
    with alike.in_place():
        items = iterators.begin(order.epoch_seed(seed, epoch))
    if samples:
        items = itertools.chain.from_iterable(items)
    if ranks > 1:
        items = every(items, rank, ranks)
    return chain(items, randomness=alike, on_close=_end_of(iterators))


def _end_of(iterators: LoaderIterators) -> Callable[[], None] | None:
    """Return what ends an iterator; None if it has no workers, and may be read in a later run."""
    return iterators.close if iterators.loader.num_workers else None


def _in_one_line(iterators: LoaderIterators, seed: int) -> Iterator[Any]:
    """Yield a loader's batches; a worker's refusal is shown without the worker's frames."""
    try:
        yield from iterators.begin(seed)
    except FsdpError as error:
        raise FsdpError(str(error).rpartition("FsdpError: ")[2].strip()) from None


def _tell_epoch(thing: Any, epoch: int) -> None:
    if hasattr(thing, "set_epoch"):
        thing.set_epoch(epoch)
