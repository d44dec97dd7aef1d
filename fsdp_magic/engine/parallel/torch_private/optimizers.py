"""ENGINE: torch's optimizers make their state in ``_init_group``, at the start of their step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def makes_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own, which makes its state in one place."""
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "_init_group")


def make_state(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Make the state of a group's parameters that have a gradient, as its step would.

    Source: ``_init_group`` of every file in torch/optim: it takes the group and lists to fill.
    """
    init_group: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    lists = len(inspect.signature(init_group).parameters) - 1
    init_group(group, *([] for _ in range(lists)))
