"""KERNEL: how engines and controllers ended: their exit codes and what they wrote last."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_magic.core.errors import EngineDiedError
from fsdp_magic.core.units import ranks_text
from fsdp_magic.panels.parts import plain

_CRASH_LINES = 40
_LAST_LINES = 5
_OWN_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+ \[[\w.-]+\]|<StreamHandler <stderr> \(\w+\)>$")
"""What ipyparallel and IPython write into the log of any engine; it says nothing of an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a process ended.

    Attributes:
        code: its exit code, negative for a signal; None: nobody knows.
        log: the last lines that it wrote, or what its interpreter wrote when it crashed.
        memory_ran_out: whether the operating system ended it to have its memory.
    """

    code: int | None
    log: tuple[str, ...] = ()
    memory_ran_out: bool = False

    @property
    def signal(self) -> int | None:
        """The signal that ended it; None: it exited by itself, or nobody knows."""
        return -self.code if self.code is not None and self.code < 0 else None

    @property
    def how(self) -> str:
        """What to say of it."""
        if self.code is None:
            return "nobody can say how"
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {self.signal}"
        full = ": killed by the system, because memory ran out" if self.memory_ran_out else ""
        return f"{name}{full}"


class OomKiller:
    """Notices when the operating system kills processes because memory ran out.

    Source: ``oom_kill`` of ``memory.events``, cgroup v2: how many processes of this control
    group it has killed; unknown where there is no such file.
    """

    def __init__(self) -> None:
        self._known = _oom_kills()

    def has_struck(self) -> bool:
        """Return whether it has killed since this was last asked."""
        before, self._known = self._known, _oom_kills()
        return self._known > before


def _oom_kills() -> int:
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        events = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events").read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))


def last_words(log: str) -> tuple[str, ...]:
    """Return the end of an engine's log, where a person may read why it ended.

    If the interpreter crashed: what it wrote then, with the lines of code it was at.
    """
    lines = [plain(line) for line in log.splitlines() if line.strip()]
    crash = next((i for i, line in enumerate(lines) if "Fatal Python error" in line), None)
    if crash is not None:
        return tuple(lines[crash : crash + _CRASH_LINES])
    return tuple(line for line in lines if not _OWN_LOG_LINE.match(line))[-_LAST_LINES:]


def died(deaths: Mapping[int, Death], *, world_size: int) -> EngineDiedError:
    """Return the error that tells of the death of engines.

    Args:
        deaths: by rank.
        world_size: number of ranks.
    """
    host = socket.gethostname()
    first = min(deaths)
    ways: dict[str, list[int]] = {}
    for rank in sorted(deaths):
        ways.setdefault(deaths[rank].how, []).append(rank)
    what = ", ".join(
        f"rank {ranks_text(tuple(on))} on {host} ended ({how})" for how, on in ways.items()
    )
    then = fate(len(deaths), of=world_size)
    lines = [f"{what}; type %fsdp_restart, which {then}"]
    for rank, death in sorted(deaths.items()):
        if death.log:
            lines += [f"the last lines of the log of rank {rank}:", *death.log]
    return EngineDiedError("\n".join(lines), rank=first, host=host, signal=deaths[first].signal)


def fate(lost: int, *, of: int) -> str:
    """Return what ``%fsdp_restart`` does about a number of lost engines, for the person."""
    if lost == of:
        return "starts fresh engines"
    others = "other keeps its" if of - lost == 1 else "others keep their"
    return f"replaces {'it' if lost == 1 else 'them'}; the {others} variables"
