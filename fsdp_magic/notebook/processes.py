"""KERNEL: a controller and engines as processes: started by ipyparallel's launchers, and ended."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fsdp_magic.core.protocol import KERNEL_PID_VARIABLE
from fsdp_magic.notebook.fork_server import ForkServer
from fsdp_magic.notebook.launch import LoopThread, children, end, ipyparallel_cluster, process_of
from fsdp_magic.notebook.launchers import fresh_engine

_PATIENCE_SECONDS = 2.0
_RESTORE = "--restore"


class Processes:
    """The processes of a cluster.

    Args:
        n: number of engines.
        directory: their profile.
        environment: variables for every engine, beside the kernel's own.
        server: makes them; None: each is started by itself.

    Attributes:
        loop: on which launchers call back.
        engines: launchers by local order, also of engines that have ended.
    """

    def __init__(
        self, n: int, *, directory: str, environment: Mapping[str, str], server: ForkServer | None
    ) -> None:
        self._n = n
        self._server = server
        self._cluster = ipyparallel_cluster(directory, n, server)
        self._environment = {**environment, KERNEL_PID_VARIABLE: str(os.getpid())}
        self._replacements = itertools.count(1)
        self.loop = LoopThread()
        self.engines: dict[int, Any] = {}
        self._ended: list[Any] = []

    @property
    def has_new_controller(self) -> bool:
        """Whether the controller took the place of one that had ended."""
        return _RESTORE in self._cluster.controller_args

    @property
    def controller(self) -> Any:
        """The controller's launcher; None: there is none yet."""
        return self._cluster.controller

    def start(self, *, check: Callable[[], None], on_end: Callable[[Any], None]) -> None:
        """Start a controller and engines, without waiting for what they do.

        Args:
            check: called some twenty times a second; what it raises gives the start up.
            on_end: called when any of them ends.
        """
        starts = self._cluster.start_controller, partial(self._cluster.start_engines, self._n)
        for start in starts:
            self.loop.run(start(environment=self._environment), check=check)
        self.engines = {int(x.identifier): x for x in self._started()}
        for launcher in (*self.engines.values(), self.controller):
            launcher.on_stop(on_end)

    def start_fresh(
        self,
        orders: Collection[int],
        started: dict[int, Any],
        *,
        check: Callable[[], None],
        on_end: Callable[[Any], None],
    ) -> None:
        """Start engines in the place of others that have ended.

        Args:
            orders: their places.
            started: gets each launcher, by its place, before it starts.
            check: see ``start``.
            on_end: called when any of them ends.
        """

        async def start() -> None:
            engines = next(iter(self._cluster.engines.values()))
            for order in orders:
                launcher = fresh_engine(engines, order, next(self._replacements))
                launcher.on_stop(on_end)
                started[order] = launcher
                launcher.start()

        self.loop.run(start(), check=check)

    def restart_controller(self, *, check: Callable[[], None]) -> None:
        """Start a controller in the place of one that has ended.

        It takes the same ports and key, and reads in a file of the other one's which engines
        there are; they connect again by themselves.
        """
        self._cluster.controller = None
        if _RESTORE not in self._cluster.controller_args:
            self._cluster.controller_args = [*self._cluster.controller_args, _RESTORE]
        start = self._cluster.start_controller(environment=self._environment)
        self.loop.run(start, check=check)

    def give_up(self, launchers: Collection[Any]) -> None:
        """End engines, also those that a fork server is just making.

        One that hangs is ended; engines that start later are started one by one.
        """
        if self._server is not None and not self.loop.is_free(seconds=_PATIENCE_SECONDS):
            self._server.kill()
            self.loop.is_free(seconds=_PATIENCE_SECONDS)
            for engines in self._cluster.engines.values():
                engines.launcher_class.fork_server = None
        self._end(list(launchers))

    def end(self) -> None:
        """End every process."""
        self.loop.run(asyncio.sleep(0))  # a start that was interrupted starts no more after this
        self._ended = self._started()  # ipyparallel forgets those that have ended
        self._end([*self._ended, self.controller])

    def close_channels(self) -> None:
        """Close the kernel's side of the channels of engines that were ended."""
        for launcher in self._ended:
            launcher.close_channel()

    def ended_logs(self) -> list[str]:
        """Return what each engine of the first start wrote that has ended."""
        return [text for s in self._cluster.engines.values() for text in list(s.outputs.values())]

    def _started(self) -> list[Any]:
        """Return the launchers of the engines that were started, also of those that have ended."""
        started = [x for s in self._cluster.engines.values() for x in s.launchers.values()]
        return list({id(x): x for x in (*started, *self.engines.values())}.values())

    def _end(self, launchers: list[Any]) -> None:
        processes = [p for p in map(process_of, launchers) if p is not None]
        end([child for p in processes for child in children(p)] + processes)
        for launcher in launchers:
            if launcher is not None:  # its thread reports to the loop once more
                with suppress(TimeoutError):
                    self.loop.run(launcher.join(timeout=1))
