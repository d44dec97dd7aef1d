"""ENGINE: a value as the kernel gets it: sharded tensors whole, on the CPU, detached."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.units import bytes_text


def whole(value: Any, *, limit_bytes: int | None = None) -> Any:
    """Return a value with every tensor in it gathered, detached and on the CPU.

    Collective: every rank must call this with a value of the same structure.

    Args:
        value: anything; lists, tuples and dicts are searched for tensors.
        limit_bytes: the most that the tensors in it may take together; None: no limit.

    Raises:
        FsdpError: if they take more; nothing was gathered.
    """
    _check_size(_tensor_bytes(value), limit_bytes)
    return _gathered(value)


def packed(value: Any, *, limit_bytes: int | None = None) -> bytes:
    """Return a value pickled for the notebook.

    Raises:
        FsdpError: if it cannot be, or takes more than ``limit_bytes``.
    """
    try:
        sent = pickle.dumps(value)
    except Exception as error:  # whatever an object's own pickling raises
        if isinstance(value, nn.Module):
            raise FsdpError(
                "a model stays on the engines; pull its weights: model.state_dict()"
            ) from None
        raise FsdpError(
            f"a {type(value).__name__} cannot be brought into the notebook ({error}); "
            "pull a part of it, or its text with repr(...)"
        ) from None
    _check_size(len(sent), limit_bytes)
    return sent


def _check_size(size: int, limit_bytes: int | None) -> None:
    if limit_bytes is not None and size > limit_bytes:
        raise FsdpError(
            f"the value takes {bytes_text(size)}, more than {bytes_text(limit_bytes)}; "
            "add --yes to bring it into the notebook all the same"
        )


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()  # of a DTensor: the global number
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(item) for item in value)
    return 0


def is_sharded(value: Any) -> bool:
    """Return whether there is a tensor in a value of which each rank holds a part."""
    return _holds(value, DTensor)


def _holds(value: Any, kind: type[torch.Tensor]) -> bool:
    if isinstance(value, dict):
        return any(_holds(item, kind) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(item, kind) for item in value)
    return isinstance(value, kind)


def _gathered(value: Any) -> Any:
    if not _holds(value, torch.Tensor):
        return value
    if isinstance(value, torch.Tensor):
        local = value.full_tensor() if isinstance(value, DTensor) else value
        return local.detach().cpu()
    if isinstance(value, dict):
        copied = copy.copy(value)  # of its own class, with what its class keeps
        copied.update((key, _gathered(item)) for key, item in value.items())
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_gathered(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_gathered(item) for item in value)
    return value


def number_or_type(value: Any) -> float | str:
    """Return a number, also one of numpy or torch, as one of Python; of anything else its type."""
    is_tensor = isinstance(value, torch.Tensor)
    size = value.numel() if is_tensor else getattr(value, "size", None)  # numpy scalars have one
    if hasattr(value, "item") and size == 1:
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else type(value).__name__
