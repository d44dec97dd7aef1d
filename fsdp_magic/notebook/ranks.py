"""KERNEL: the engines as ranks: given their places, replaced, brought back into order.

A cluster knows processes and engine ids; a session speaks of ranks. This gives the engines their
ranks, recovers the world after a failure, and remembers when it cannot be recovered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import EngineDiedError, FsdpError
from fsdp_magic.core.protocol import JoinRequest, RecoverRequest
from fsdp_magic.core.recovery import RecoverReport, RestoreReport, RestoreRequest
from fsdp_magic.core.reply import Reply
from fsdp_magic.notebook.cluster import Cluster
from fsdp_magic.notebook.deaths import died
from fsdp_magic.notebook.escalations import Patience
from fsdp_magic.notebook.fork_server import ForkServer
from fsdp_magic.notebook.live import Follower, Interruptions
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.screen import Nowhere
from fsdp_magic.notebook.snapshot_files import SnapshotFiles
from fsdp_magic.notebook.torn_steps import Weights
from fsdp_magic.notebook.world import WorldPlan

_QUICK_SECONDS, _REPLACE_SECONDS = 30.0, 10.0


class Ranks:
    """Running engines, one a rank.

    Args:
        plan: the world to start.
        server: makes their processes; None: each is started by itself.
        interruptions: hold interrupts back while they start and stop.
        snapshots: the memory for theirs.
        cost: -> what the end of an engine costs, for the person; nothing: nothing.

    Attributes:
        cluster: their processes.
        broken: why nothing can be asked any more; None: all is well.
        weights: whether those of all ranks belong to one step.
    """

    def __init__(
        self,
        plan: WorldPlan,
        server: ForkServer | None,
        interruptions: Interruptions,
        snapshots: SnapshotFiles,
        *,
        cost: Callable[[], str] = str,
    ) -> None:
        self._interruptions = interruptions
        self.cluster = Cluster(
            plan.n, environment=plan.environment, server=server, interruptions=interruptions
        )
        self.broken: FsdpError | None = None
        self.weights = Weights()
        self._plan = plan
        self._snapshots = snapshots
        self._cost = cost
        self._ranks: dict[int, int] = {}
        self._generation = 1
        self._stuck: tuple[int, ...] = ()
        try:
            self.cluster.start()
            self._join()
            self.cluster.check_interrupted()
        except BaseException:
            self.cluster.stop()
            raise

    def stop(self) -> None:
        """End them."""
        self.cluster.stop()

    def release(self) -> None:
        """Free every rank that waits for another."""
        for engine_id in self.cluster.deaths:  # nobody need wait until these are quiet
            self.cluster.page.note_idle(self._ranks[engine_id])
        self.cluster.page.release(self._generation)

    def _join(self) -> None:
        """Give every engine its rank, and let them meet."""
        hellos = self.cluster.hellos
        order = sorted(hellos, key=lambda i: (hellos[i].host, hellos[i].local_order))
        self._ranks = {engine_id: rank for rank, engine_id in enumerate(order)}
        self.cluster.watch()
        self._quick({e: ("join", self._join_request(r)) for e, r in self._ranks.items()})

    def _join_request(self, rank: int) -> JoinRequest:
        directory, files = self.cluster.directory, self._snapshots.paths(rank)
        return self._plan.join_request(rank, directory=directory, snapshots=files)

    def _restore(self) -> RestoreReport:
        """Put every rank back to the newest snapshot."""
        report: RestoreReport = self._quick_reports("restore", RestoreRequest())[0]
        return report

    def _check_dead(self) -> None:
        """Raise if an engine has ended; nothing can be asked any more then."""
        deaths = {self._ranks[engine_id]: d for engine_id, d in self.cluster.deaths.items()}
        if deaths:
            self.broken = died(deaths, world_size=len(self._ranks), cost=self._cost())
            raise self.broken

    def _engines_of(self, ranks: Collection[int]) -> tuple[int, ...]:
        return tuple(engine_id for engine_id, rank in self._ranks.items() if rank in ranks)

    # -- replacing

    @property
    def lost(self) -> tuple[int, ...]:
        """The ids of the engines that have ended, or are stuck."""
        return tuple({*self.cluster.deaths, *self._stuck})

    @property
    def why_broken(self) -> str:
        """What happened to the lost engines, in a line."""
        with suppress(EngineDiedError):
            self._check_dead()
        return str(self.broken).partition("\n")[0]

    def replace(self) -> tuple[int, ...]:
        """Put a fresh engine in the place of each lost one; the others keep what they have.

        Returns:
            The ranks that have a fresh engine.

        Raises:
            FsdpError: if it cannot be done; the engines are as they were, or worse.
            CellInterrupted: if the person gave it up; the engines are as they were.
        """
        self.cluster.kill(self._stuck)
        fresh = self.cluster.replace(self.lost)
        self._stuck = ()
        for old, new in fresh.items():
            self._ranks[new] = self._ranks.pop(old)
        self.cluster.watch()
        ranks = tuple(sorted(self._ranks[engine_id] for engine_id in fresh.values()))
        self._generation += 1
        recover = RecoverRequest(generation=self._generation, replaced=ranks)
        asked: dict[int, tuple[str, Any]] = {e: ("recover", recover) for e in self._ranks}
        for engine_id in fresh.values():
            request = self._join_request(self._ranks[engine_id])
            asked[engine_id] = "join", replace(request, generation=self._generation, replaced=ranks)
        self._quick(asked, seconds=_REPLACE_SECONDS)
        self.broken, self.weights = None, Weights()
        return ranks

    def _recover(self) -> list[RecoverReport]:
        """Replace the transports of every rank, and return what each had done by then."""
        self._generation += 1
        return self._quick_reports("recover", RecoverRequest(generation=self._generation))

    def _quick_reports(self, verb: str, request: Any) -> list[Any]:
        """Ask every engine for what must work, and return the reports by rank."""
        try:
            replies = self._quick({engine_id: (verb, request) for engine_id in self._ranks})
            return [reply.report for reply in sorted(replies, key=lambda reply: reply.rank)]
        except EngineDiedError:
            raise
        except FsdpError as error:
            self.broken = FsdpError(f"{error}; type %fsdp_restart for fresh engines")
            raise self.broken from None

    def _quick(
        self, asked: Mapping[int, tuple[str, Any]], *, seconds: float = _QUICK_SECONDS
    ) -> list[Reply]:
        """Ask engines, by id, for something short that runs none of the person's code."""
        ranks = {engine_id: self._ranks[engine_id] for engine_id in asked}
        verbs = " and ".join(sorted({verb for verb, _ in asked.values()}))
        with self._interruptions:
            outcome = Follower(
                ranks=ranks,
                events=self.cluster.send_each(asked),
                output=Output(list(ranks.values()), screen=Nowhere()),
                interruptions=self._interruptions,
                escalation=Patience(self),
                timeout=seconds,
            ).follow()
        self._stuck = self._engines_of(outcome.stuck)
        self._check_dead()
        for reply in outcome.replies.values():
            if reply.failure is not None:
                failure = reply.failure
                raise FsdpError(f"{verbs} failed: {failure.exception_type}: {failure.message}")
        if outcome.failed:
            raise FsdpError(f"{verbs} did not end on every engine within {seconds:.0f} s")
        return list(outcome.replies.values())
