"""ENGINE: batches of samples of like length, at most so many tokens each, padding included.

The epoch's permutation is cut into chunks of about a hundred batches; each chunk is sorted by
length and cut where one more sample would make longest × samples too large; then the batches of
all chunks are shuffled. So a batch holds little padding, and which samples meet in it still
changes by epoch. Everything follows from (seed, epoch) and the lengths: ranks need not talk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.order import permutation

_BATCHES_PER_CHUNK = 100


def sample_lengths(dataset: Any, indices: Sequence[int]) -> dict[int, int]:
    """Return the length of each sample by its index.

    Raises:
        FsdpError: if one has none.
    """
    rows = dataset
    if "input_ids" in getattr(dataset, "column_names", ()) and hasattr(dataset, "select_columns"):
        rows = dataset.select_columns(["input_ids"])  # need not read the others
    return {index: sample_length(rows[index], index) for index in set(indices)}


def sample_length(sample: Any, index: int) -> int:
    """Return the tokens of a sample: its ``input_ids``, or itself, or its first tensor.

    Raises:
        FsdpError: if it has no length.
    """
    counted = _counted(sample)
    if isinstance(counted, torch.Tensor):
        counted = None if counted.ndim == 0 else range(len(counted))
    if counted is None or not hasattr(counted, "__len__"):
        raise FsdpError(
            f"--tokens-per-batch needs samples with a length, and sample {index} is a "
            f"{type(sample).__name__} without any; give it input_ids, or use --micro-batch-size"
        )
    return len(counted)


def token_batches(
    order: Sequence[int],
    lengths: Mapping[int, int],
    *,
    tokens: int,
    seed: int,
    epoch: int,
    shuffle: bool,
) -> list[list[int]]:
    """Return the batches of an epoch.

    Args:
        order: the epoch's indices.
        lengths: tokens of each sample by index.
        tokens: the most that longest × samples of a batch may be.
        seed: of the session.
        epoch: which one.
        shuffle: whether samples may change places; if not, batches are cut in the given order.

    Raises:
        FsdpError: if a sample alone is longer than ``tokens``.
    """
    longest = max(set(order), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > tokens:
        raise FsdpError(
            f"sample {longest} has {lengths[longest]} tokens, more than --tokens-per-batch "
            f"{tokens}; give --tokens-per-batch {lengths[longest]} or more, or cut the sample"
        )
    if not shuffle:
        return list(_cut(order, lengths, tokens))
    mean = max(1, sum(lengths[i] for i in order) // max(1, len(order)))
    chunk = max(1, _BATCHES_PER_CHUNK * (tokens // mean))
    batches = [
        batch
        for start in range(0, len(order), chunk)
        for batch in _cut(
            sorted(order[start : start + chunk], key=lengths.__getitem__), lengths, tokens
        )
    ]
    return [batches[i] for i in permutation(len(batches), seed + 1, epoch)]


def _cut(order: Sequence[int], lengths: Mapping[int, int], tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def _counted(sample: Any) -> Any:
    """Return the part of a sample whose length is the sample's."""
    if isinstance(sample, Mapping):
        return sample.get("input_ids", next(iter(sample.values()), None))
    if isinstance(sample, (list, tuple)):
        return next((part for part in sample if isinstance(part, torch.Tensor)), sample)
    ids = getattr(sample, "input_ids", None)
    return sample if ids is None else ids
