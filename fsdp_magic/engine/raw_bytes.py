"""ENGINE: the bytes of a tensor, read where they lie.

``tensor.numpy()`` would do, but on a CPU it makes the storage one that cannot be resized for as
long as it lives; then it can never be parked.
"""

from __future__ import annotations

import ctypes

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array._tensor = tensor  # type: ignore[attr-defined]  # its memory stays while the view does
    return memoryview(array).cast("B")
