"""KERNEL: how a process ended whose parent ended before it, asked of the operating system.

Only a parent may wait for a process. While the one that inherits it has not done so, the process
table tells anybody how it ended; afterwards its process descriptor does, from Linux 6.15 on.
Source: proc_pid_stat(5), field 52, and ``PIDFD_GET_INFO`` in Linux's include/uapi/linux/pidfd.h.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from contextlib import suppress
from pathlib import Path

_PIDFD_GET_INFO, _INFO_BYTES = 0xC040FF0B, 64
_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60


def exit_code_of_orphan(pid: int, descriptor: int) -> int | None:
    """Return how a process has ended.

    Args:
        pid: its process id.
        descriptor: its process descriptor, which says that it has ended.

    Returns:
        Its exit code, negative for a signal; None: this system does not tell any more.
    """
    status = _of_zombie(pid, descriptor)
    if status is None:
        status = _of_descriptor(descriptor)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _of_zombie(pid: int, descriptor: int) -> int | None:
    """Return the wait status of a process that nobody has waited for yet."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        signal.pidfd_send_signal(descriptor, 0)  # gone: its id may be somebody else's
        if state == "Z":
            return int(fields[-1])
    return None


def _of_descriptor(descriptor: int) -> int | None:
    """Return the wait status of a process that somebody has waited for."""
    info = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:  # before Linux 6.13 there is no such call
        return None
    (told,) = struct.unpack_from("=Q", info, 0)
    (status,) = struct.unpack_from("=i", info, _EXIT_CODE_OFFSET)
    return status if told & _INFO_EXIT else None
