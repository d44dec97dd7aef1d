"""ENGINE: what operators on CPUs need for a moment, inside of them where no mode sees it.

oneDNN computes convolutions in layouts of its own, with channels in blocks. It copies what it reads
into them and what it has computed out of them: an input, a weight and an output forward; backward
first an output's gradient, a weight and an input's gradient, then an output's gradient, an input
and a weight's gradient. Images of few channels are read as they are.

The backward of a BatchNorm makes the gradient of its input twice, and fills the second.

Source: events of the CPU allocator under torch 2.13, ``mkldnn_convolution_backward`` in
aten/src/ATen/native/mkldnn/Conv.cpp, and ``batch_norm_backward_cpu_template`` in
aten/src/ATen/native/Normalization.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_ATEN = torch.ops.aten
_BLOCK = 8
"""Channels of a block, of the smallest that oneDNN has."""

WITH_MOMENTS = (
    _ATEN.convolution.default,
    _ATEN.convolution_backward.default,
    _ATEN.native_batch_norm_backward.default,
)


def moments_of(func: Any, args: tuple[Any, ...], out: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each output that is computed, with the bytes that are taken for a moment just before.

    Args:
        func: one of ``WITH_MOMENTS``.
        args: of it.
        out: what it returned.
    """
    if func is _ATEN.convolution.default:
        yield out, _copied(args[0]) + _copied(args[1]) + _copied(out)
    elif func is _ATEN.native_batch_norm_backward.default:
        if out[0] is not None:
            yield out[0], 2 * out[0].nbytes
    else:
        yield from _of_convolution_backward(args, out)


def _of_convolution_backward(args: tuple[Any, ...], out: Any) -> Iterator[tuple[torch.Tensor, int]]:
    gradient, image, weight = args[:3]
    if out[0] is not None:
        yield out[0], _copied(gradient) + _copied(weight) + _copied(out[0])
    if out[1] is not None:
        yield out[1], _copied(gradient) + _copied(image) + _copied(out[1])


def _copied(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, if it is copied."""
    is_read_as_it_is = tensor.ndim > 1 and tensor.shape[1] < _BLOCK
    return 0 if is_read_as_it_is else tensor.numel() * tensor.element_size()
