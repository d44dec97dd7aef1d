"""KERNEL: what ends the wait for engines that start: an interrupt, an end, too long a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fsdp_magic.core.errors import CellInterrupted, FsdpError
from fsdp_magic.notebook.cluster_files import last_lines
from fsdp_magic.notebook.live import Interruptions
from fsdp_magic.notebook.processes import Processes

_START_SECONDS = 120.0
_FORK_SECONDS, _SPAWN_SECONDS = 10.0, 30.0
"""How long a fresh engine may take: one that is forked, and one that imports torch itself."""


def start_check(
    processes: Processes, *, n: int, ready: Mapping[int, Any], interrupted: Callable[[], None]
) -> Callable[[], None]:
    """Return a function that raises once a start has failed.

    Args:
        processes: that start.
        n: number of engines.
        ready: those that are there.
        interrupted: raises if the person has given it up.
    """
    deadline = time.monotonic() + _START_SECONDS

    def check() -> None:
        interrupted()
        controller = processes.controller
        if controller.state == "after":
            raise FsdpError(
                f"the controller ended while starting: {controller.stop_data}; the end of its "
                f"log:\n{last_lines(controller.get_output())}"
            )
        logs = processes.ended_logs()
        if logs:
            raise FsdpError(
                f"{n} engines were asked for and {len(logs)} ended while starting; the end of "
                f"the log:\n{last_lines(logs[0])}"
            )
        if time.monotonic() > deadline:
            raise FsdpError(
                f"{n} engines were asked for, {len(ready)} came within "
                f"{_START_SECONDS:.0f} s; try %fsdp_init -n {max(1, len(ready))}"
            )

    return check


def replacement_check(
    fresh: Mapping[int, Any], interruptions: Interruptions, *, forked: bool
) -> Callable[[], None]:
    """Return a function that raises once engines could not be replaced.

    Args:
        fresh: launchers of those that were started.
        interruptions: counts those of the person.
        forked: whether a fork server makes them.
    """
    seconds = _FORK_SECONDS if forked else _SPAWN_SECONDS
    deadline = time.monotonic() + seconds

    def check() -> None:
        if interruptions.count:
            raise CellInterrupted(
                "interrupted before the engines were replaced; the others keep their variables: "
                "type %fsdp_restart"
            )
        ended = [launcher for launcher in fresh.values() if launcher.state == "after"]
        if ended:
            log = last_lines(ended[0].get_output())
            raise FsdpError(f"a fresh engine ended while starting; the end of its log:\n{log}")
        if time.monotonic() > deadline:
            raise FsdpError(f"no fresh engine came within {seconds:.0f} s")

    return check
