"""KERNEL: what an interrupt, a timeout or a death does to a request that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_magic.notebook.run import Run

if TYPE_CHECKING:
    from fsdp_magic.notebook.ranks import Ranks


class CellEscalation:
    """An interrupted cell: SIGINT, then broken transports. A run: a clean stop first."""

    def __init__(self, engines: Ranks, engine_ids: list[int], run: Run | None) -> None:
        self._engines = engines
        self._engine_ids = engine_ids
        self._run = run

    def press(self, times: int, /) -> float:
        """Ask the ranks to stop, and force them at the second time; see ``live.Escalation``."""
        if times > 1:
            return 0.0
        cluster = self._engines.cluster
        if self._run is not None:
            self._run.is_stopping = True
            cluster.page.stop(self._run.run_id)
            return float("inf")
        cluster.interrupt(self._engine_ids)
        return 1.0

    def force(self) -> None:
        """Make them stop."""
        self._engines.cluster.interrupt(self._engine_ids)
        self._engines.release()


class Patience:
    """A short request of our own is not interrupted; it ends by itself, or with a peer.

    However often a person has pressed stop, before it or meanwhile: what brings the ranks back
    into order must not be given up halfway.
    """

    def __init__(self, engines: Ranks) -> None:
        self._engines = engines

    def press(self, _times: int, /) -> float:
        """Do nothing."""
        return float("inf")

    def force(self) -> None:
        """Let the ranks that wait for a dead one go."""
        self._engines.release()
