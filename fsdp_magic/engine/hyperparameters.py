"""ENGINE: in what an optimizer's hyperparameters differ from those that a snapshot holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_magic.engine.snapshot_content import OptimizerContent
from fsdp_magic.engine.snapshot_unpacking import Unpacker

_UNKNOWN = "not a plain value"


def edited(
    name: str, optimizer: Optimizer, kept: OptimizerContent, unpacker: Unpacker
) -> Iterator[str]:
    """Yield a sentence for each hyperparameter that a person edited since a snapshot.

    What schedulers set changes by itself, so then only those are compared that the optimizers
    were made with.

    Args:
        name: of the optimizer.
        optimizer: as the person made it.
        kept: as the snapshot holds it.
        unpacker: of the snapshot.
    """
    groups = [(optimizer.param_groups[i], group) for i, group in enumerate(kept.groups)]
    scheduled = any("initial_lr" in group for pair in groups for group in pair)
    pairs = [(optimizer.defaults, kept.defaults)] if scheduled else groups
    for key in kept.defaults:
        for typed, held in pairs:
            ours, theirs = _plain(typed.get(key)), _plain(unpacker.unpack(held.get(key)))
            if _UNKNOWN not in (ours, theirs) and ours != theirs:
                yield f"{key} of `{name}` is {theirs} as in the snapshot; the cell says {ours}"
                break


def _plain(value: Any) -> Any:
    """Return a value that can be compared and shown; ``_UNKNOWN``: it cannot."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _UNKNOWN
    if isinstance(value, tuple):
        parts = tuple(map(_plain, value))
        return _UNKNOWN if _UNKNOWN in parts else parts
    return value if isinstance(value, (bool, int, float, str, type(None))) else _UNKNOWN
