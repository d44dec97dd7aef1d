"""What NVML says of the card, without touching CUDA in this process."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_magic.notebook.devices import gpu_count
from fsdp_magic.notebook.session import Session


def card() -> dict[str, Any]:
    """Return what the checks ran on."""
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if gpu_count() == 0:
        return versions
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    versions |= {
        "card": pynvml.nvmlDeviceGetName(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "gpus": gpu_count(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    pynvml.nvmlShutdown()
    return versions


def nvml_used_bytes(session: Session) -> int:
    """Return what NVML counts as used on rank 0's card, without the driver's own reserve."""
    import pynvml

    uuid = session.pull("str(torch.cuda.get_device_properties(device).uuid)")
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(info.used)
    finally:
        pynvml.nvmlShutdown()


def processes_on_gpus() -> set[int]:
    """Return the processes that the driver lists on any card."""
    if gpu_count() == 0:
        return set()
    import pynvml

    pynvml.nvmlInit()
    try:
        return {
            process.pid
            for index in range(pynvml.nvmlDeviceGetCount())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByIndex(index)
            )
        }
    finally:
        pynvml.nvmlShutdown()
