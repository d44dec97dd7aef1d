"""What the chaos suite knows of the machine: processes, files, ports and threads of ours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE

_GONE_SECONDS = 2.0


def processes() -> dict[int, str]:
    """Return the living processes that belong to this kernel: name and command line by id."""
    mine = f"{KERNEL_PID_VARIABLE}={os.getpid()}".encode()
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mine in file.read().split(b"\0"):
                    process = psutil.Process(int(pid))
                    found[int(pid)] = " ".join([process.name(), *process.cmdline()])
        except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or somebody else's
    return found


def listening() -> set[tuple[str, int]]:
    """Return where this process listens."""
    connections = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == "LISTEN"}


def until(done: Callable[[], Any], *, seconds: float = _GONE_SECONDS) -> bool:
    """Return whether something came true within a time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process holds open."""

    descriptors: int
    threads: int


def held(pid: int) -> Held:
    """Return how many files and threads a process has."""
    process = psutil.Process(pid)
    return Held(descriptors=process.num_fds(), threads=process.num_threads())


def growth(series: Sequence[Mapping[int, Held]]) -> dict[int, Held]:
    """Return by process what a long series has left open: its last tenth against its first.

    Args:
        series: by process id, after each case; what is not there from first to last is left out.
    """
    part = max(1, len(series) // 10)
    grown = {}
    for pid in set(series[0]).intersection(*series):
        first, last = ([held[pid] for held in some] for some in (series[:part], series[-part:]))
        grown[pid] = Held(
            descriptors=min(h.descriptors for h in last) - max(h.descriptors for h in first),
            threads=min(h.threads for h in last) - max(h.threads for h in first),
        )
    return grown
