"""ENGINE: in which order the samples of an epoch come: one order of (seed, epoch) for all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from fsdp_magic.engine.randomness import TrainingRandomness

_EPOCH_STRIDE = 1_000_003


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed of an epoch's own, the same on all ranks."""
    return (seed * _EPOCH_STRIDE + epoch) % 2**63


def drawing_alike(seed: int, epoch: int) -> TrainingRandomness:
    """Return a random state for drawing alike on all ranks.

    Training cells draw differently on each; a person's sampler or stream that draws must not, or
    ranks would cut different orders.
    """
    return TrainingRandomness(epoch_seed(seed, epoch), rank=0)


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    """Return the indices of an epoch, shuffled."""
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    return [int(i) for i in torch.randperm(length, generator=generator).tolist()]


def sampler_order(sampler: Any, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """Return the order that a DataLoader's sampler gives, the same on all ranks.

    Args:
        sampler: torch's or the person's; whatever it draws, it draws from the session's seed.
        seed: of the session.
        epoch: told to a sampler that has ``set_epoch``.
        shuffle: whether torch's random sampler shuffles; another sampler is read as it is.
    """
    if isinstance(sampler, RandomSampler) and _takes_each_once(sampler):
        length = len(sampler)
        return permutation(length, seed, epoch) if shuffle else list(range(length))
    if isinstance(sampler, SequentialSampler):
        return list(range(len(sampler)))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with drawing_alike(seed, epoch).in_place():
        return [int(index) for index in sampler]


def _takes_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and len(sampler) == len(sampler.data_source)
