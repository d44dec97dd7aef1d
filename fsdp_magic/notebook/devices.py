"""KERNEL: which GPUs there are, found without touching CUDA.

A kernel that called CUDA once would hold part of a GPU for good, and could not fork. NVML only
reads. What counts is what the engines will see, so ``CUDA_VISIBLE_DEVICES`` is honoured.
"""

from __future__ import annotations

import os


def gpu_count() -> int:
    """Return how many GPUs an engine of this machine sees; 0 without a driver."""
    present = _present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    entries = _listed(visible)
    if any(entry.startswith("MIG-") for entry in entries):
        return len(entries)  # instances of a card, which count as devices
    return min(len(entries), present)


def _present() -> int:
    """Return how many cards the driver knows."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _listed(visible: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES; -1 ends the list, as CUDA reads it."""
    entries: list[str] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry in ("", "-1"):
            break
        entries.append(entry)
    return entries
