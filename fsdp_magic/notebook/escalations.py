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

    def ask(self) -> float:
        """Ask the ranks to stop; see ``live.Escalation``."""
        cluster = self._engines.cluster
        if self._run is not None:
            cluster.page.stop(self._run.run_id)
            return float("inf")
        cluster.interrupt(self._engine_ids)
        return 1.0

    def force(self) -> None:
        """Make them stop."""
        self._engines.cluster.interrupt(self._engine_ids)
        self._engines.release()


class Patience:
    """A short request of our own is not interrupted; it ends by itself, or with a peer."""

    def __init__(self, engines: Ranks) -> None:
        self._engines = engines

    def ask(self) -> float:
        """Do nothing."""
        return float("inf")

    def force(self) -> None:
        """Let the ranks that wait for a dead one go."""
        self._engines.release()
