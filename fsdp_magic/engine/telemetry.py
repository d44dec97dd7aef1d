"""ENGINE: what a rank's device is doing: memory by the allocator's own figures, utilisation.

On CUDA: torch's caching allocator says what is allocated and reserved, the driver what is used
on the whole device, NVML how busy it is. On CPU there is no device, so the C library's allocator
stands in: allocated is what malloc has given out since the rank was ready, reserved what it
holds. With ``--memory-limit`` the kernel of the operating system refuses more than the limit, so
a CPU rank runs out of memory like a GPU does.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import psutil
import torch

from fsdp_magic.core.protocol import JoinRequest
from fsdp_magic.core.telemetry import DeviceSample, MemorySample
from fsdp_magic.engine.parallel.torch_private import storage_bytes
from fsdp_magic.engine.processor import processor_name
from fsdp_magic.engine.time_share import TimeShare

_MARK_SECONDS = 0.1
_FIRST_STEPS = 3


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(n, ctypes.c_size_t) for n in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


class CpuMeter:
    """Memory of a CPU rank, counted from the moment it was ready.

    Args:
        capacity_bytes: what this rank may take: its limit, or its share of the host.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        info = _mallinfo()
        self._allocated_before = info.uordblks + info.hblkhd
        self._reserved_before = info.arena + info.hblkhd
        self._peak = 0

    def sample(self) -> MemorySample:
        """Return the memory of this moment."""
        info = _mallinfo()
        allocated = max(0, info.uordblks + info.hblkhd - self._allocated_before)
        reserved = max(allocated, info.arena + info.hblkhd - self._reserved_before)
        self._peak = max(self._peak, allocated)
        return MemorySample(
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            used_bytes=reserved,
            capacity_bytes=self._capacity,
            peak_allocated_bytes=self._peak,
        )

    def reset_peak(self) -> None:
        """Count the peak from here."""
        self._peak = 0


class CudaMeter:
    """Memory of a GPU rank.

    Args:
        device: its GPU.
        fraction: the share it may use; None: all.
    """

    def __init__(self, device: torch.device, fraction: float | None) -> None:
        self._device = device
        _, total = torch.cuda.mem_get_info(device)
        self._capacity = int(total * fraction) if fraction is not None else total

    def sample(self) -> MemorySample:
        """Return the memory of this moment; does not wait for the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        return MemorySample(
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            used_bytes=total - free,
            capacity_bytes=self._capacity,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
        )

    def reset_peak(self) -> None:
        """Count the peak from here."""
        torch.cuda.reset_peak_memory_stats(self._device)


class MemoryWatch:
    """The memory of a training run: now, and at its height, with what it is made of.

    The service thread looks at it while the main thread trains, so it holds numbers, never
    tensors: on torch 2.13 even reading ``parameter.grad`` in another thread corrupts the heap.

    Args:
        parameters: every parameter of the sharded models, trained or not.
        optimizers: those that step.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._parameters = list({id(p): p for p in parameters}.values())
        self._optimizers = list(optimizers)
        self._parameter_bytes = sum(map(_device_bytes, self._parameters))
        self._all_gradients_bytes = 0
        self._gradient_bytes = 0
        self._optimizer_bytes = 0
        self._states_counted = -1
        self._lock = threading.Lock()
        self._marks = True
        self._steps = 0
        self._marking = TimeShare(least_seconds=_MARK_SECONDS)
        self.count_optimizer_state()
        self._peak = self.now()

    # -- for the main thread

    def mark(self) -> None:
        """Look, where memory is at a height; on CUDA the allocator keeps its own peak.

        On CPU a look costs up to a millisecond (``mallinfo2`` walks every free chunk), so the
        marks of a whole step count, or none do.
        """
        if self._marks and isinstance(_METER[0], CpuMeter):
            with self._marking.spending():
                self.look()

    def mark_gradients(self) -> None:
        """Note that the gradients are there, and look; they are counted at the first time."""
        if self._all_gradients_bytes == 0:
            self._all_gradients_bytes = sum(
                _device_bytes(p.grad) for p in self._parameters if p.grad is not None
            )
        self._gradient_bytes = self._all_gradients_bytes
        self.mark()

    def count_optimizer_state(self) -> None:
        """Count the optimizers' state, if there is more of it than at the last count."""
        states = sum(len(optimizer.state) for optimizer in self._optimizers)
        if states == self._states_counted:
            return
        self._states_counted = states
        self._optimizer_bytes = sum(
            _device_bytes(value)
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def forget_peak(self) -> MemorySample:
        """Count the height from here, and return that so far."""
        before = self.peak()
        reset_peak()
        with self._lock:
            self._peak = self.now()
        return before

    def step_over(self) -> None:
        """Note that no gradient is left, and decide whether the next step's marks count."""
        self._gradient_bytes = 0
        self._steps += 1
        # the first steps always count: the optimizer's state comes in the first
        self._marks = self._marking.is_due(time.monotonic()) or self._steps < _FIRST_STEPS

    # -- for any thread

    def now(self) -> MemorySample:
        """Return the memory of this moment."""
        return replace(
            memory(),
            parameter_bytes=self._parameter_bytes,
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=self._optimizer_bytes,
        )

    def look(self) -> None:
        """Remember this moment if no earlier one had more allocated."""
        sample = self.now()
        with self._lock:
            if sample.allocated_bytes > self._peak.allocated_bytes:
                self._peak = sample

    def peak(self) -> MemorySample:
        """Return the moment with the most allocated, with the true peak of the allocator."""
        return self.now_and_peak()[1]

    def now_and_peak(self) -> tuple[MemorySample, MemorySample]:
        """Return this moment, and that with the most allocated, by one look."""
        now = self.now()
        return now, replace(self._peak, peak_allocated_bytes=now.peak_allocated_bytes)


_METER: list[CpuMeter | CudaMeter] = []


def prepare(request: JoinRequest) -> None:
    """Start measuring; nearly the last thing of joining."""
    if request.device == "cuda":
        device = torch.device("cuda", request.cuda_index or 0)
        _METER[:] = [CudaMeter(device, request.gpu_fraction)]
        return
    share = psutil.virtual_memory().total // request.local_world_size
    _METER[:] = [CpuMeter(request.memory_limit_bytes or share)]


def is_measured() -> bool:
    """Return whether this rank has begun to measure."""
    return bool(_METER)


def memory() -> MemorySample:
    """Return the memory of this rank's device at this moment."""
    return _METER[0].sample()


def reset_peak() -> None:
    """Count peaks from here."""
    _METER[0].reset_peak()


def activity(device: torch.device) -> DeviceSample:
    """Return how busy the device is; unknown on CPU and where NVML is not there."""
    handle = _nvml_handle(device.index) if device.type == "cuda" else None
    if handle is None:
        return DeviceSample()
    import pynvml

    def read(function: Any, *args: Any) -> float | None:
        try:
            return float(function(handle, *args))
        except pynvml.NVMLError:
            return None

    power = read(pynvml.nvmlDeviceGetPowerUsage)
    return DeviceSample(
        utilisation_percent=read(lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).gpu),
        temperature_celsius=read(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        power_watts=None if power is None else power / 1000,
    )


def _device_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in the memory that is metered; none of what is offloaded."""
    elsewhere = isinstance(_METER[0], CudaMeter) and tensor.device.type == "cpu"
    return 0 if elsewhere else storage_bytes(tensor)


def device_name(device: torch.device) -> str:
    """Return the name of the card, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


@cache
def _nvml_handle(index: int) -> Any:
    """Return NVML's handle of a CUDA device, found by UUID: the two count in other orders."""
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except (pynvml.NVMLError, AttributeError):
        return None


@cache
def _mallinfo_function() -> Any:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _MallInfo
    return function


def _mallinfo() -> Any:
    return _mallinfo_function()()
