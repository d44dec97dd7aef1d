"""KERNEL: the verbs that look at engines and change nothing: status, shards, values, a console."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_magic.core.completion import CompleteRequest, Completions
from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.protocol import ConsoleRequest, ShardsRequest, StatusRequest
from fsdp_magic.core.reply import Reply
from fsdp_magic.core.telemetry import RankStatus
from fsdp_magic.core.wording import quoted
from fsdp_magic.notebook import display
from fsdp_magic.notebook import variables as variables_of
from fsdp_magic.notebook.lifetime import Lifetime
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.screen import Nowhere
from fsdp_magic.panels import mosaic, status

_COMPLETION_SECONDS = 0.5
"""A person who pressed Tab goes on typing after this."""


class Inspection(Lifetime):
    """What can be seen of engines."""

    def _ipython_display_(self) -> None:
        """Show the ranks where a cell ends in the session, unless the cell has just drawn them."""
        if not self.alive:
            display.write("stdout", f"{self!r}\n")
        elif not display.is_shown(self):
            self.status()

    @property
    def runs(self) -> list[Run]:
        """Every ``Run``, also those that raised."""
        return self._history.runs

    def shards(self, model: str = "", *, show: bool = True) -> Placement:
        """Return where every parameter of a sharded model lives; without a name the only one."""
        replies = self._quietly("shards", self._everywhere(ShardsRequest(model=model)))
        placement: Placement = replies[0].report
        if show:
            display.show(mosaic.html(placement), mosaic.text(placement))
        return placement

    def status(self, *, show: bool = True) -> list[RankStatus]:
        """Return what each rank is and how its memory stands, by rank.

        While ranks are dead or stuck: of the others, and what happened is said below.
        """
        if self.engines.lost:
            return self._status_of_the_living(show=show)
        replies = self._quietly("status", self._everywhere(StatusRequest()))
        ranks: list[RankStatus] = [replies[rank].report for rank in sorted(replies)]
        if show:
            self.show_status(ranks)
        return ranks

    def _status_of_the_living(self, *, show: bool) -> list[RankStatus]:
        reports = self.engines.look("status", StatusRequest())
        ranks: list[RankStatus] = [reports[rank] for rank in sorted(reports)]
        if show:
            if ranks:
                self.show_status(ranks)
            display.write("stdout", f"{self.engines.why_broken}\n")
        return ranks

    def show_status(self, ranks: Sequence[RankStatus]) -> None:
        """Show ranks, hosts, devices and memory, and the last panel again."""
        stamp = display.stamp()
        display.show(status.html(ranks, stamp=stamp), status.text(ranks, stamp=stamp))
        display.mark_shown(self)
        if self._history.last_frame is not None:
            display.show(*self._history.last_frame)

    def pull(self, expression: str, *, rank: int | str = 0, yes: bool = False) -> Any:
        """Return the value of an expression on a rank, or of all ranks as a list.

        A sharded tensor is gathered by all ranks and comes whole, on the CPU, detached.

        Args:
            expression: Python.
            rank: a rank, or ``"all"``.
            yes: also above 1 GiB.
        """
        return variables_of.pull(
            self.engines, expression, rank=rank, yes=yes, world_size=self.world_size
        )

    def number(self, flag: str, expression: str) -> float:
        """Return the number that an option's value stands for on the engines.

        Raises:
            UsageError: if it is no number there, or not the same one on every rank.
        """
        return variables_of.number(self.engines, flag, expression, world_size=self.world_size)

    def console(self, rank: int = 0) -> str:
        """Return the command that opens a console on a rank, in a terminal of this machine.

        It is that of this Python's own environment, where the terminal may not look by itself.

        The console waits while a cell runs; what it binds, cells find.

        Raises:
            UsageError: if there is no such rank.
        """
        if rank not in range(self.world_size):
            raise UsageError(
                f"--rank {quoted(rank)} does not exist; this world has ranks 0 to "
                f"{self.world_size - 1}"
            )
        path = self._quietly("console", {rank: ConsoleRequest()})[rank].report
        command = Path(sys.executable).with_name("jupyter")
        return f"{shlex.quote(str(command))} console --existing {shlex.quote(path)}"

    def completions(self, line: str) -> Completions | None:
        """Return what may stand at the end of a line of code; None if no answer comes at once."""
        if self._engines is None:
            return None
        request = CompleteRequest(line=line, seconds=_COMPLETION_SECONDS * 0.8)
        found: Completions | None = self._engines.glance(
            "complete", 0, request, seconds=_COMPLETION_SECONDS
        )
        return found

    def _name(self, magic: str) -> str:
        """Return a file name for code that is not of a cell, so that each keeps its own lines."""
        return f"<%%{magic} [run {next(self._names)}]>"

    def _everywhere(self, request: Any) -> dict[int, Any]:
        return dict.fromkeys(range(self.world_size), request)

    def _quietly(
        self, verb: str, requests: Mapping[int, Any], *, timeout: float | None = None
    ) -> dict[int, Reply]:
        """Ask ranks without showing what they print."""
        return self.engines.ask(verb, requests, screen=Nowhere(), timeout=timeout)[0]
