"""ENGINE: torch's optimizers: where they make their state, and what their steps compute with.

They make their state in ``_init_group``, at the start of their step. Then each calls one function
with lists of tensors, as ``torch.optim.adam.adam``, which computes element by element. On shards
that is the same as on each rank's part alone, without the twenty microseconds that torch takes to
dispatch every operation on a ``DTensor``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_ELEMENTWISE = ("adam", "sgd", "nadam", "radam", "adagrad", "rmsprop")
"""Files of torch/optim, and functions in them: these compute no element with another."""


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


@functools.cache
def step_on_own_parts() -> None:
    """Have torch's elementwise optimizers compute with each rank's part of shards; for good."""
    for name in _ELEMENTWISE:
        module = importlib.import_module(f"torch.optim.{name}")
        setattr(module, name, _on_own_parts(getattr(module, name)))


def _on_own_parts(update: Callable[..., None]) -> Callable[..., None]:
    """Return a function that updates in place as another, but not through ``DTensor``.

    Args:
        update: takes lists with one tensor a parameter, parameters first; some may be empty.
    """

    @functools.wraps(update)
    def updated(params: list[torch.Tensor], *lists: list[Any], **options: Any) -> None:
        if options.get("differentiable") or not _fit(params, lists):
            return update(params, *lists, **options)
        return update(_own_parts(params), *map(_own_parts, lists), **options)

    return updated


def _fit(params: Sequence[torch.Tensor], lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether all that belongs to a shard is a shard of the same elements, or a number.

    None stands for state that the update is still to make: it would be of the part's kind.
    """
    for tensors in lists:
        for parameter, tensor in zip(params, tensors, strict=False):
            if not isinstance(parameter, DTensor):
                continue
            if isinstance(tensor, DTensor):
                if not _are_alike(tensor, parameter):
                    return False
            elif tensor is None or tensor.ndim:
                return False
    return any(isinstance(parameter, DTensor) for parameter in params)


def _are_alike(tensor: DTensor, parameter: DTensor) -> bool:
    same = tensor.placements == parameter.placements
    return same and tensor._local_tensor.shape == parameter._local_tensor.shape


def _own_parts(tensors: Sequence[Any]) -> list[Any]:
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
