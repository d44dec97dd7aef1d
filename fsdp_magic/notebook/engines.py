"""KERNEL: engines asked together: a request sent to ranks, followed, and settled if it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_magic.core.errors import CellInterrupted, FsdpError, UsageError
from fsdp_magic.core.reply import Reply
from fsdp_magic.core.units import ranks_named
from fsdp_magic.notebook.deaths import Death, controller_ended, fate
from fsdp_magic.notebook.escalations import CellEscalation
from fsdp_magic.notebook.fork_server import ForkServer
from fsdp_magic.notebook.live import Follower, Interruptions, Outcome
from fsdp_magic.notebook.outcomes import failure_of, waiting_at_the_end
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.ranks import Ranks
from fsdp_magic.notebook.rich_displays import DisplayNames
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.screen import Nowhere, Screen
from fsdp_magic.notebook.snapshot_files import SnapshotFiles
from fsdp_magic.notebook.stacks import Stacks
from fsdp_magic.notebook.waiting import WaitingWatch
from fsdp_magic.notebook.world import WorldPlan
from fsdp_magic.panels import waiting

_LOOK_SECONDS = 2.0
_GLANCE_SECONDS = 0.2
"""How long a request waits for a look at an engine that another thread is just sending."""


class Engines(Ranks):
    """Running engines that answer requests, one a rank."""

    def __init__(
        self,
        plan: WorldPlan,
        server: ForkServer | None,
        interruptions: Interruptions,
        snapshots: SnapshotFiles,
        *,
        cost: Callable[[], str] = str,
    ) -> None:
        self._told: Death | None = None
        self._displays = DisplayNames()
        self._asking = threading.Lock()
        super().__init__(plan, server, interruptions, snapshots, cost=cost)

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
                on_waiting=None if run is None else run.wait,
                timeout=timeout,
            ).follow()
            if run is not None:
                run.finish([reply.report for reply in outcome.replies.values() if reply.report])
            said = self._settle(outcome, output, timeout, asked=requests)
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

    def _stacks(self) -> Stacks:
        """Return what asks engines for their stacks."""
        hellos = self.cluster.hellos
        pids = {rank: hellos[engine_id].pid for engine_id, rank in self._ranks.items()}
        return Stacks(directory=Path(self.cluster.directory), pids=pids)

    def _settle(
        self, outcome: Outcome, output: Output, timeout: float | None, *, asked: Collection[int]
    ) -> str:
        """Bring the ranks back into order after a failure, and raise what happened.

        Args:
            outcome: of the request.
            output: what the ranks printed.
            timeout: seconds that it might take.
            asked: the ranks that it was sent to.

        Returns:
            What there is to say of a torn step, after an interrupt.
        """
        self._stuck = self._engines_of(outcome.stuck)
        self._check_dead()
        if outcome.stuck:
            told = "".join(f"\n{line}" for line in filter(None, [self._cost()]))
            told += "" if outcome.waited is None else "\n" + waiting.text(outcome.waited)
            self.broken = FsdpError(
                f"{ranks_named(outcome.stuck)} did not come out of the cell within 5 s; "
                f"type %fsdp_restart, which {fate(len(outcome.stuck), of=len(self._ranks))}{told}"
            )
            raise self.broken
        said = ""
        if outcome.failed or self.cluster.page.released_generation >= self._generation:
            reports = self._recover()
            said = self.weights.judge(reports, self._restore, ran=asked)
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
