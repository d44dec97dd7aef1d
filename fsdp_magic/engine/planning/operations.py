"""ENGINE: what operators compute and move, counted while they are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

_ATEN = torch.ops.aten


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """Return torch's formulas by operator, and those of attention on the CPU.

    Source: torch/utils/flop_counter.py, which leaves the CPU's attention out.
    """
    return {
        **flop_registry,
        _ATEN._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    }


class Operations:
    """Sums over operators.

    Attributes:
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes that operators read and write, views none.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.moved = 0

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add what one operator does."""
        if func.is_view:
            return
        formula = _formulas().get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        self.moved += sum(_bytes(t) for t in _tensors((args, out)))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
