"""KERNEL: the engines as ranks: given their places, asked together, brought back into order.

A cluster knows processes and engine ids; a session speaks of ranks. Between them stands this: it
sends a request to ranks, follows it, recovers the world after a failure, and remembers when it
cannot be recovered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_magic.core.errors import CellInterrupted, EngineDiedError, FsdpError, UsageError
from fsdp_magic.core.protocol import JoinRequest, RecoverRequest, Reply
from fsdp_magic.core.recovery import RecoverReport, RestoreReport, RestoreRequest
from fsdp_magic.core.units import ranks_text
from fsdp_magic.notebook.cluster import Cluster
from fsdp_magic.notebook.deaths import Death, controller_ended, died, fate
from fsdp_magic.notebook.escalations import CellEscalation, Patience
from fsdp_magic.notebook.fork_server import ForkServer
from fsdp_magic.notebook.live import Follower, Interruptions, Outcome
from fsdp_magic.notebook.outcomes import failure_of, waiting_at_the_end
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.rich_displays import DisplayNames
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.screen import Nowhere, Screen
from fsdp_magic.notebook.snapshot_files import SnapshotFiles
from fsdp_magic.notebook.stacks import Stacks
from fsdp_magic.notebook.torn_steps import Weights
from fsdp_magic.notebook.waiting import WaitingWatch
from fsdp_magic.notebook.world import WorldPlan
from fsdp_magic.panels import waiting

_QUICK_SECONDS, _REPLACE_SECONDS = 30.0, 10.0
_LOOK_SECONDS = 2.0
_GLANCE_SECONDS = 0.2
"""How long a request waits for a look at an engine that another thread is just sending."""


class Engines:
    """Running engines, one a rank.

    Args:
        plan: the world to start.
        server: makes their processes; None: each is started by itself.
        interruptions: hold interrupts back while they start and stop.
        snapshots: the memory for theirs.

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
    ) -> None:
        self._interruptions = interruptions
        self.cluster = Cluster(
            plan.n, environment=plan.environment, server=server, interruptions=interruptions
        )
        self.broken: FsdpError | None = None
        self.weights = Weights()
        self._plan = plan
        self._snapshots = snapshots
        self._ranks: dict[int, int] = {}
        self._generation = 1
        self._stuck: tuple[int, ...] = ()
        self._told: Death | None = None
        self._displays = DisplayNames()
        self._asking = threading.Lock()
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

    def ask(
        self,
        verb: str,
        requests: Mapping[int, Any],
        *,
        screen: Screen,
        timeout: float | None = None,
        run: Run | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> tuple[dict[int, Reply], Output]:
        """Send a request to ranks, follow it, and turn failures into exceptions.

        Args:
            verb: what to do.
            requests: by rank.
            screen: where what the ranks print and display is shown.
            timeout: seconds it may take; None: any time.
            run: takes the progress; with one, an interrupt asks for a clean stop first.
            on_tick: called some twenty times a second.

        Raises:
            UsageError: if another request is under way, of another thread or around this one.
        """
        if self.broken is not None:
            raise self.broken.with_traceback(None)  # else it grows with each cell
        self._check_dead()
        engines = {rank: engine_id for engine_id, rank in self._ranks.items()}
        asked = {engines[rank]: request for rank, request in requests.items()}
        output = Output(sorted(requests), screen=screen, names=self._displays)
        with self._alone():  # from before it is sent until the ranks are in order again
            outcome = Follower(
                ranks={engine_id: self._ranks[engine_id] for engine_id in asked},
                events=self.cluster.send(verb, asked),
                output=output,
                interruptions=self._interruptions,
                escalation=CellEscalation(self, list(asked), run),
                on_progress=None if run is None else run.add,
                on_tick=on_tick
                if isinstance(screen, Nowhere)
                else partial(self._tick, output, on_tick),
                watch=WaitingWatch(page=self.cluster.page, stacks=self._stacks()),
                on_waiting=None if run is None else partial(setattr, run, "waiting"),
                timeout=timeout,
            ).follow()
            if run is not None:
                run.finish([reply.report for reply in outcome.replies.values() if reply.report])
            said = self._settle(outcome, output, timeout)
        if self._interruptions.count:
            lines = ["interrupted", *waiting_at_the_end(outcome.replies), *filter(None, [said])]
            interrupted = CellInterrupted("\n".join(lines))
            interrupted.torn = said
            raise interrupted
        if self.cluster.lost is not None:
            raise self.cluster.lost
        return outcome.replies, output

    def glance(self, verb: str, rank: int, request: Any, *, seconds: float) -> Any:
        """Ask one rank beside all else, and return its report; None if there is none in time.

        It disturbs nothing: nothing is asked while a cell runs, an engine that is busy is not
        interrupted, and what goes wrong is no error.
        """
        engine_id = next(e for e, r in self._ranks.items() if r == rank)
        if (
            self.broken is not None
            or self.cluster.deaths
            or not self._asking.acquire(blocking=False)
        ):
            return None
        try:  # a request that comes meanwhile does not wait for the answer
            events = self.cluster.send(verb, {engine_id: request})
        finally:
            self._asking.release()
        return events.reports({engine_id}, seconds=seconds).get(engine_id)

    def look(self, verb: str, request: Any) -> dict[int, Any]:
        """Ask the ranks that are there, also when others are lost; return reports by rank."""
        there = [engine_id for engine_id in self._ranks if engine_id not in self.lost]
        with self._alone():
            events = self.cluster.send(verb, dict.fromkeys(there, request))
            reports = events.reports(set(there), seconds=_LOOK_SECONDS)
        return {self._ranks[engine_id]: report for engine_id, report in reports.items()}

    def _tick(self, output: Output, on_tick: Callable[[], None] | None) -> None:
        """Do what is due some twenty times a second; tell once that the controller has ended."""
        death = self.cluster.controller_death
        if death is not None and death is not self._told:
            self._told = death
            output.note(str(controller_ended(death)))
        if on_tick is not None:
            on_tick()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a request while another is under way, which would never get its answers."""
        with Interruptions() as waiting:  # none may come between the lock and its release
            if not self._asking.acquire(timeout=_GLANCE_SECONDS):
                raise UsageError(
                    "the engines are running a cell; wait until it has ended, or interrupt it"
                )
            try:
                with self._interruptions as interruptions:
                    interruptions.count += waiting.count
                    yield
            finally:
                self._asking.release()

    def release(self) -> None:
        """Free every rank that waits for another."""
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

    def _stacks(self) -> Stacks:
        """Return what asks engines for their stacks."""
        hellos = self.cluster.hellos
        pids = {rank: hellos[engine_id].pid for engine_id, rank in self._ranks.items()}
        return Stacks(directory=Path(self.cluster.directory), pids=pids)

    def _settle(self, outcome: Outcome, output: Output, timeout: float | None) -> str:
        """Bring the ranks back into order after a failure, and raise what happened.

        Returns:
            What there is to say of a torn step, after an interrupt.
        """
        self._stuck = self._engines_of(outcome.stuck)
        self._check_dead()
        if outcome.stuck:
            told = "" if outcome.waited is None else "\n" + waiting.text(outcome.waited)
            self.broken = FsdpError(
                f"rank {ranks_text(outcome.stuck)} did not come out of the cell within 5 s; "
                f"type %fsdp_restart, which {fate(len(outcome.stuck), of=len(self._ranks))}{told}"
            )
            raise self.broken
        said = ""
        if outcome.failed or self.cluster.page.released_generation >= self._generation:
            reports = self._recover()
            said = self.weights.judge(reports, self._restore)
        if outcome.failed and not self._interruptions.count:
            error = failure_of(
                outcome.replies,
                output,
                timeout=timeout if outcome.timed_out else None,
                hopeless=outcome.waited if outcome.hopeless else None,
            )
            error.is_torn = self.weights.torn_now
            if said:
                error.add_line(said)
            raise error
        return said

    def _restore(self) -> RestoreReport:
        """Put every rank back to the newest snapshot."""
        report: RestoreReport = self._quick_reports("restore", RestoreRequest())[0]
        return report

    def _check_dead(self) -> None:
        """Raise if an engine has ended; nothing can be asked any more then."""
        deaths = {self._ranks[engine_id]: d for engine_id, d in self.cluster.deaths.items()}
        if deaths:
            self.broken = died(deaths, world_size=len(self._ranks))
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
