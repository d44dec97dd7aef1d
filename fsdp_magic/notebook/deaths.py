"""KERNEL: how engines and controllers ended: their exit codes and what they wrote last."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_magic.core.errors import EngineDiedError, FsdpError
from fsdp_magic.core.units import ranks_named
from fsdp_magic.panels.parts import plain

_CRASH_LINE = re.compile(
    r"Fatal Python error|Thread 0x|Current thread|  File \"|  \.\.\.|  <|Extension modules:|$"
)
"""Source: faulthandler, Python/traceback.c and Modules/faulthandler.c."""
_CRASH_LINES, _LAST_LINES = 8, 5
_UNREAD_BYTES = 1 << 16
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


class Deaths(dict[int, Death]):
    """How engines ended, by engine id.

    What C code wrote to standard error just before it ended the process (``terminate called
    after throwing ...``) stands in a pipe that nobody in the engine reads any more. So each pipe
    is held open here, and read once its engine has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pipes: dict[int, int] = {}
        self._kills = _oom_kills()

    def expect(self, engine_id: int, pid: int) -> None:
        """Hold the pipe of an engine of this host."""
        with suppress(OSError):  # it ended, or its file descriptors are hidden from us
            self._pipes[engine_id] = os.open(
                f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )

    def note(self, engine_id: int, code: int | None, log: str) -> None:
        """Note that an engine has ended.

        Args:
            engine_id: which.
            code: its exit code, negative for a signal.
            log: what it wrote.
        """
        before, self._kills = self._kills, _oom_kills()
        self[engine_id] = Death(
            code=code,
            log=last_words(log + self._unread(engine_id)),
            memory_ran_out=code == -signal.SIGKILL and self._kills > before,
        )

    def close(self) -> None:
        """Let go of the pipes."""
        for engine_id in list(self._pipes):
            self._unread(engine_id)

    def _unread(self, engine_id: int) -> str:
        descriptor = self._pipes.pop(engine_id, -1)
        if descriptor < 0:
            return ""
        try:
            return os.read(descriptor, _UNREAD_BYTES).decode(errors="replace")
        except OSError:  # a child of the engine's lives and holds the pipe: nothing is in it
            return ""
        finally:
            os.close(descriptor)


def _oom_kills() -> int:
    """Return how many processes of this control group were killed because memory ran out.

    Source: ``oom_kill`` of ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1);
    0 where there is no such file.
    """
    for path in _oom_files():
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
    return 0


def _oom_files() -> Iterator[Path]:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                yield Path(f"/sys/fs/cgroup{group}", "memory.events")
            elif "memory" in controllers.split(","):
                yield Path(f"/sys/fs/cgroup/memory{group}", "memory.oom_control")


def last_words(log: str) -> tuple[str, ...]:
    """Return the end of an engine's log, where a person may read why it ended.

    What the interpreter writes of a crash comes last, whatever else was written meanwhile.
    """
    lines = [line for line in plain(log).splitlines() if not _OWN_LOG_LINE.match(line)]
    start = next((i for i, line in enumerate(lines) if "Fatal Python error" in line), len(lines))
    crash = [line for line in lines[start:] if _CRASH_LINE.match(line)]
    other = lines[:start] + [line for line in lines[start:] if not _CRASH_LINE.match(line)]
    told = [line for line in other if line.strip()]
    return (*told[-_LAST_LINES:], *_crash(crash))


def _crash(lines: Sequence[str]) -> Iterator[str]:
    """Yield what says where the interpreter crashed: the thread's frames down to ours.

    A thread of C code has none; then the cell's own lines say what was under way.
    """
    if not lines:
        return
    yield lines[0]
    current = list(itertools.dropwhile(lambda x: not x.startswith("Current thread"), lines))
    frames = itertools.takewhile(lambda x: "fsdp_magic/engine" not in x and x, current[1:])
    of_cells = (line for line in lines if '"<%%' in line)
    yield from itertools.islice(frames if current else of_cells, _CRASH_LINES)


def died(deaths: Mapping[int, Death], *, world_size: int, cost: str = "") -> EngineDiedError:
    """Return the error that tells of the death of engines.

    Args:
        deaths: by rank.
        world_size: number of ranks.
        cost: what is lost with them, in a line; nothing: nothing.
    """
    host = socket.gethostname()
    first = min(deaths)
    ways: dict[str, list[int]] = {}
    for rank in sorted(deaths):
        ways.setdefault(deaths[rank].how, []).append(rank)
    what = ", ".join(
        f"{ranks_named(tuple(on))} on {host} ended ({how})" for how, on in ways.items()
    )
    then = fate(len(deaths), of=world_size)
    lines = [f"{what}; type %fsdp_restart, which {then}", *filter(None, [cost])]
    for rank, death in sorted(deaths.items()):
        if death.log:
            lines += [f"the last lines of the log of rank {rank}:", *death.log]
    return EngineDiedError("\n".join(lines), rank=first, host=host, signal=deaths[first].signal)


def controller_ended(death: Death) -> FsdpError:
    """Return the error that tells of the end of the controller."""
    lines = [
        f"ipyparallel's controller ended ({death.how}): %%px and session.client do not work until "
        "%fsdp_restart starts another one; all else goes on, and nothing is lost"
    ]
    if death.log:
        lines += ["the last lines of its log:", *death.log]
    return FsdpError("\n".join(lines))


def fate(lost: int, *, of: int) -> str:
    """Return what ``%fsdp_restart`` does about a number of lost engines, for the person."""
    if lost == of:
        return "starts fresh engines"
    others = "other keeps its" if of - lost == 1 else "others keep their"
    return f"replaces {'it' if lost == 1 else 'them'}; the {others} variables"
