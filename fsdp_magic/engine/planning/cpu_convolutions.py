"""ENGINE: what convolutions on CPUs need for a moment, inside an operator where no mode sees it.

oneDNN computes in layouts of its own, with channels in blocks. It copies what it reads into them
and what it has computed out of them: an input, a weight and an output forward; backward first an
output's gradient, a weight and an input's gradient, then an output's gradient, an input and a
weight's gradient. Images of few channels are read as they are.

Source: events of the CPU allocator under torch 2.13, and ``mkldnn_convolution_backward`` in
aten/src/ATen/native/mkldnn/Conv.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_ATEN = torch.ops.aten
_BLOCK = 8
"""Channels of a block, of the smallest that oneDNN has."""


CONVOLUTIONS = (_ATEN.convolution.default, _ATEN.convolution_backward.default)


def moments_of(func: Any, args: tuple[Any, ...], out: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each output that is computed, with the bytes of the copies that it takes just before.

    Args:
        func: one of ``CONVOLUTIONS``.
        args: of it.
        out: what it returned.
    """
    if func is _ATEN.convolution.default:
        yield out, _copied(args[0]) + _copied(args[1]) + _copied(out)
        return
    gradient, image, weight = args[:3]
    if out[0] is not None:
        yield out[0], _copied(gradient) + _copied(weight) + _copied(out[0])
    if out[1] is not None:
        yield out[1], _copied(gradient) + _copied(image) + _copied(out[1])


def _copied(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, if it is copied."""
    is_read_as_it_is = tensor.ndim > 1 and tensor.shape[1] < _BLOCK
    return 0 if is_read_as_it_is else tensor.numel() * tensor.element_size()
