"""KERNEL: which GPUs there are, found without touching CUDA.

A kernel that called CUDA once would hold part of a GPU for good, and could not fork. NVML only
reads. What counts is what the engines will see, so ``CUDA_VISIBLE_DEVICES`` is honoured.
"""

from __future__ import annotations

import os


def gpu_count() -> int:
    """Return how many GPUs an engine of this machine sees; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _listed(visible)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _listed(visible: str) -> int:
    """Count the entries of CUDA_VISIBLE_DEVICES; -1 ends the list, as CUDA reads it."""
    count = 0
    for entry in visible.split(","):
        if entry.strip() in ("", "-1"):
            break
        count += 1
    return count
