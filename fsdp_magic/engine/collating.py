"""ENGINE: samples -> batch, where the person names no function for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from fsdp_magic.core.errors import FsdpError

Collate = Callable[[list[Any]], Any]

_RAGGED = ("equal size", "same size")


def collate_samples(samples: list[Any]) -> Any:
    """Return a batch as torch makes it by default.

    Raises:
        FsdpError: if samples differ in length, or are of a kind that torch cannot put together.
    """
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if not any(words in str(error) for words in _RAGGED):
            raise
        raise FsdpError(
            "the samples of a batch differ in length, and nothing says how to pad them; pass "
            "--collate NAME, such as a DataCollatorWithPadding"
        ) from None
    except TypeError as error:
        kind = type(samples[0]).__name__
        raise FsdpError(
            f"samples of type {kind} cannot be put into a batch ({error}); pass --collate NAME, "
            "a function: list of samples -> batch"
        ) from None


def collate_rows(samples: list[Any]) -> Any:
    """Return a batch of rows of a Hugging Face data set: lists of numbers become tensors.

    torch's own default would transpose them: 12 tensors of 8 tokens for 8 rows of 12.
    """
    return collate_samples([_with_tensors(row) for row in samples])


def _with_tensors(row: Any) -> Any:
    if not isinstance(row, Mapping):
        return row
    return {key: _as_tensor(value) for key, value in row.items()}


def _as_tensor(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError):  # text, or lists that differ in length
        return value
