"""ENGINE: ``--memory-limit``: a CPU rank runs out of memory where a device of that size would.

The operating system refuses more (``RLIMIT_DATA``) while the person's code runs, and only then:
what the engine does for itself must not fail. It reads requests, and starts threads for new
transports, also when the person's variables leave no room.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_magic.core.units import KIB, MIB

_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 128 * KIB
"""From which size on malloc maps memory for each request: what it begins with, and raises by
itself. At 1 MiB activations below it left holes of half a limit. But the system clears mapped pages
each time: a step of a small GPT-2 takes 1.7 times as long as without (benchmarks/memory_limit.py),
at 1 MiB it took 1.2 times. Source: malloc.h of glibc."""
_OWN_BYTES = 64 * MIB
"""Room beyond the limit for the engine's own threads and messages."""
_LIMIT: list[int] = []
"""What ``RLIMIT_DATA`` may count beside stacks while the person's code runs; empty: no limit."""
_STACK_BYTES = 2 * MIB
"""Of a thread, where the system sets no limit. Source: glibc's ARCH_STACK_DEFAULT_SIZE."""


def fix(limit_bytes: int) -> None:
    """Set the limit, counted from here: the last thing of joining."""
    # a freed tensor goes back to the system, as on a device, and leaves no hole in a heap
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    _LIMIT[:] = [_data_bytes() + limit_bytes + _OWN_BYTES]


def is_set() -> bool:
    """Return whether there is a limit."""
    return bool(_LIMIT)


@contextmanager
def limited() -> Iterator[None]:
    """Keep to the limit inside."""
    if not _LIMIT:
        yield
        return
    with _refused_beyond(_LIMIT[0]):
        yield


@contextmanager
def room_for(more_bytes: int) -> Iterator[None]:
    """Let this process take so many bytes more inside; for one without a limit."""
    with _refused_beyond(_data_bytes() + more_bytes + _OWN_BYTES):
        yield


@contextmanager
def lowered(by_bytes: int) -> Iterator[None]:
    """Have the limit that is set lower inside."""
    with _refused_beyond(_LIMIT[0] - by_bytes):
        yield


@contextmanager
def _refused_beyond(data_bytes: int) -> Iterator[None]:
    import resource  # here: plans are made on systems without it, too

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + _stack_bytes(), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Return what RLIMIT_DATA counts for this process, beside the stacks of its threads.

    Source: ``VmData`` of /proc/self/status (proc(5)).
    """
    with open(f"/proc/{os.getpid()}/status") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024 - _stack_bytes()
    raise RuntimeError("/proc/self/status has no VmData")


def _stack_bytes() -> int:
    """Return what the stacks of this process's threads take of RLIMIT_DATA.

    Every new group brings threads, and none of them is the person's.
    """
    import resource

    each = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if each == resource.RLIM_INFINITY:
        each = _STACK_BYTES
    return each * (len(os.listdir("/proc/self/task")) - 1)  # the first has one of its own
