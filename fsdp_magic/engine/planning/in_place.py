"""ENGINE: what autograd does in place, and does not while a dispatch mode looks on.

Where gradients of one tensor add up, autograd adds to the one that it holds if nobody else does.
With a dispatch mode or a tensor subclass it always makes a new one, so a trace would count more
than there is.

Source: ``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp, ``index_backward`` in
torch/csrc/autograd/FunctionsManual.cpp.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ATEN = torch.ops.aten
_INDEX_PUTS = (_ATEN.index_put.default, _ATEN._index_put_impl.default)


def takes_place_of_first(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator in backward would write to its first argument outside a mode."""
    if func is _ATEN.add.Tensor:
        return _is_sum_of_gradients(args) and _is_alone(args[0])
    if func in _INDEX_PUTS:
        node = _node()
        return node is not None and type(node).__name__ == "IndexBackward0"
    return False


def _is_sum_of_gradients(args: tuple[Any, ...]) -> bool:
    """Return whether two gradients are added by autograd itself."""
    if torch.is_grad_enabled() or not isinstance(args[1], torch.Tensor):
        return False
    first, second = args[0], args[1]
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    node = _node()
    return node is not None and not isinstance(node, BackwardCFunction)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Return whether nobody but autograd holds a gradient, and it has all of its memory."""
    if not tensor.is_contiguous() and not _is_dense(tensor):
        return False
    uses = tensor._use_count()  # type: ignore[attr-defined]
    return uses <= uses_when_alone() and _storage_uses(tensor) <= _ONE_HOLDER


_ONE_HOLDER = 2
"""The tensor, and the object that asks."""


def _storage_uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie side by side, in any order of dims."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=_by_stride):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _by_stride(dim: tuple[int, int]) -> tuple[int, int]:
    return dim[1], dim[0]


def _node() -> Any:
    return torch._C._current_autograd_node()


class _Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how often the first of two gradients is held when they are added."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.add.Tensor and not torch.is_grad_enabled():
            self.uses = args[0]._use_count()
        return func(*args, **(kwargs or {}))


@functools.cache
def uses_when_alone() -> int:
    """Return how often a gradient that only autograd holds is held, as a mode sees it.

    It is measured, outside backward, because it counts what torch's own call holds.
    """
    with _disable_current_modes(), torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        middle = leaf * 1
        total = middle.sin() + middle.cos()
        with _Counts() as counts:
            torch.autograd.grad(total, leaf, torch.ones(1))
    return int(counts.uses)
