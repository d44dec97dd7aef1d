"""ENGINE: what is in a batch: tensors, samples, tokens; and bringing it to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def sample_count(batch: Any) -> int | None:
    """Return the number of samples of a batch: dim 0 of its tensors, if they agree."""
    lengths = {len(tensor) for tensor in tensors(batch) if tensor.ndim > 0}
    return lengths.pop() if len(lengths) == 1 else None


def token_count(batch: Any) -> int | None:
    """Return the number of tokens of a batch that says its ``input_ids``; None otherwise."""
    if not isinstance(batch, Mapping):
        return None
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) else None


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch with every tensor in it on a device; its structure is kept."""
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=True))


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with every tensor in it changed; its structure is kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        made = {key: mapped(item, function) for key, item in value.items()}
        return made if type(value) is dict else _rebuilt(value, made)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, function) for item in value)
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _rebuilt(value: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """Return a mapping of the same class (a BatchEncoding, say); a dict if it cannot be made."""
    try:
        return type(value)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved
