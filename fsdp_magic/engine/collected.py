"""ENGINE: the rows that an evaluation cell collects, made ready to be sent to the kernel.

The kernel never imports torch, so tensors become numpy arrays here, also those inside lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError


def checked_rows(collect: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """Return rows as arrays and lists, one row per sample.

    Args:
        collect: as the cell bound it.
        count: samples of the batch; None: it has no number of samples, and any will do.

    Raises:
        FsdpError: if there are more or fewer rows than samples.
    """
    rows = {str(name): _rows(str(name), value) for name, value in collect.items()}
    for name, value in rows.items():
        if count is not None and len(value) != count:
            raise FsdpError(
                f"collect[{name!r}] has {len(value)} rows and the batch {count} samples; collect "
                "one row per sample"
            )
    return rows


def _rows(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.ndim:
            return _sent(value)
    elif hasattr(value, "dtype") and getattr(value, "ndim", 0) != 0:  # a numpy array stays one
        return value
    elif hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping)):
        return [_sent(row) for row in value]
    what = "one number" if hasattr(value, "dtype") else f"a {type(value).__name__}"
    raise FsdpError(
        f"collect[{name!r}] is {what}; it takes one row per sample, in a tensor or a list "
        "(a number for the whole batch goes into `metrics`)"
    )


def _sent(value: Any) -> Any:
    """Return a value without tensors in it: arrays, and numbers for those of dimension 0."""
    if isinstance(value, dict):
        return {key: _sent(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_sent(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    value = value.detach().cpu()
    if value.dtype is torch.bfloat16:  # numpy has none
        value = value.float()
    return value.numpy() if value.ndim else value.item()
