"""ENGINE and CONTROLLER: a process that ends its parent once the notebook's kernel is gone.

A thread cannot do this: C code that holds the interpreter lock would keep it from running. So
the first thing an engine does, small and with one thread, is to fork a watcher. It waits on two
process descriptors, which cannot be confused by a reused process id: the kernel's and its
parent's. When the kernel ends, the watcher kills its parent and every process below it; when
the parent ends, it kills what the parent left in its process group.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE

_REMOVALS, _REMOVAL_SECONDS = 20, 0.05
_NAME = "fsdp watcher"


def kernel_descriptor(*, remove: str | None = None) -> int:
    """Return a descriptor of the kernel's process; ends this one if the kernel is gone.

    Must be called in a process that the kernel started itself.

    Args:
        remove: a directory to delete if it is gone.
    """
    kernel_pid = int(os.environ[KERNEL_PID_VARIABLE])
    try:
        kernel = os.pidfd_open(kernel_pid)
    except ProcessLookupError:
        kernel = -1
    if kernel < 0 or os.getppid() != kernel_pid:  # it died; its id may be somebody else's by now
        _remove(remove)
        os._exit(1)
    return kernel


def guard(kernel: int, *, remove: str | None = None) -> None:
    """Fork the watcher of this process; must be called before any thread is started.

    Args:
        kernel: a descriptor of the kernel's process; it stays open.
        remove: a directory to delete once the kernel is gone.
    """
    guarded_pid = os.getpid()
    guarded = os.pidfd_open(guarded_pid)
    if os.fork() != 0:
        os.close(guarded)
        return
    try:
        _close_all_but(kernel, guarded)
        _watch(kernel=kernel, guarded=guarded, guarded_pid=guarded_pid, remove=remove)
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    """Close every other descriptor: a socket must not look open because a watcher lives."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # the one that listed them
                os.close(int(name))


def _watch(*, kernel: int, guarded: int, guarded_pid: int, remove: str | None) -> None:
    """Wait for either end, then clean up; runs in the forked watcher."""
    Path("/proc/self/comm").write_text(_NAME)  # what ``top`` shows
    group = os.getpgid(guarded_pid)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    poll = select.poll()
    poll.register(kernel, select.POLLIN)
    poll.register(guarded, select.POLLIN)
    ended = {descriptor for descriptor, _ in poll.poll()}
    if kernel in ended:
        _kill_tree(guarded_pid)
    if group == guarded_pid:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    if kernel in ended:
        _remove(remove)


def _remove(directory: str | None) -> None:
    """Delete a directory, again and again while a dying engine may still write into it."""
    if directory is None:
        return
    for _ in range(_REMOVALS):
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(_REMOVAL_SECONDS)
        if not os.path.exists(directory):  # nor did anybody make it anew meanwhile
            return


def _kill_tree(root: int) -> None:
    """Kill a process and all below it; it is frozen first so that it starts no more.

    Other watchers are left alone. A process that was being forked meanwhile is missed here; it
    dies with its group, and the group is the business of the watcher that guards it. (The fork
    server's watcher once killed that of the controller, whose scheduler lived on for ever.)
    """
    _kill(root, signal.SIGSTOP)
    below = [pid for pid in _descendants(root) if pid != os.getpid()]
    for pid in (root, *below):
        _kill(pid, signal.SIGKILL)


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descendants(root: int) -> Iterator[int]:
    """Yield every process below one but watchers, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        # the second field is a name in parentheses that may itself hold spaces
        before, _, after = stat.rpartition(")")
        if before.partition("(")[2] != _NAME:
            children.setdefault(int(after.split()[1]), []).append(int(entry.name))
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            yield child
            waiting.append(child)
