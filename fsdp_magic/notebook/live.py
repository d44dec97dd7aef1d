"""KERNEL: following a request until every rank has answered.

One loop in the main thread takes what the ranks say: it shows their output, hands progress on,
and ends when all have answered or died. Ctrl-C does not raise in here: it is counted, and the
loop decides what it means, so no answer is lost halfway.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Protocol

from ipyparallel.error import RemoteError

from fsdp_magic.core.reply import Reply
from fsdp_magic.core.telemetry import ProgressReport
from fsdp_magic.notebook.events import (
    Answered,
    Cleared,
    Died,
    Displayed,
    Event,
    Events,
    Located,
    Printed,
    Progressed,
)
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.rich_displays import Shown
from fsdp_magic.notebook.waiting import WaitingWatch
from fsdp_magic.panels import waiting as waiting_panel
from fsdp_magic.panels.waiting import WaitingView

_TICK_SECONDS = 0.05
_EVENTS_PER_TICK = 500
_FORCE_AGAIN_SECONDS = 1.0
_STUCK_SECONDS = 5.0
"""How long ranks may take to come out after one of them failed."""


class Escalation(Protocol):
    """What to do at an interrupt, a timeout or a death."""

    def press(self, times: int, /) -> float:
        """Answer an interrupt, and return after how many seconds to force the ranks.

        Args:
            times: how often the person has pressed stop since the request was made.
        """

    def force(self) -> None:
        """Make the ranks stop: a rank has died, they are too late, or the person insists."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a request ended.

    Attributes:
        replies: by rank; a rank that died or is stuck has none.
        timed_out: whether it took longer than allowed.
        dead: ranks whose engine ended.
        stuck: ranks that did not come out in time.
        waited: where the ranks were when they last waited for each other; None: they never did.
        hopeless: whether they were stopped because each waited for others that could never come.
    """

    replies: dict[int, Reply] = field(default_factory=dict)
    timed_out: bool = False
    dead: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    waited: WaitingView | None = None
    hopeless: bool = False

    @property
    def failed(self) -> bool:
        """Whether any rank did not finish as it should."""
        failures = any(reply.failure is not None for reply in self.replies.values())
        return bool(self.dead or self.stuck) or failures


@dataclass(slots=True, kw_only=True)
class _Deadlines:
    """When to force the ranks out, and when to give up on those that do not come."""

    started: float
    force_at: float = float("inf")
    give_up_at: float = float("inf")
    handled: int = 0
    """Interrupts that were answered."""

    def give_up_by(self, moment: float) -> None:
        self.give_up_at = min(self.give_up_at, moment)


@dataclass(kw_only=True)
class Follower:
    """Follows one request; used inside ``with interruptions``.

    Attributes:
        ranks: rank by engine id, of the engines that were asked.
        events: where they answer.
        output: where their output goes.
        interruptions: counts what the person does; was there before the request was sent.
        escalation: what an interrupt does.
        on_progress: called with every progress report.
        on_tick: called some twenty times a second, for panels.
        watch: finds out whether ranks wait for each other; None: nobody is told.
        on_waiting: shows where they are, or that they go on (None); without one it is printed.
        timeout: seconds the request may take; None: any time.
    """

    ranks: Mapping[int, int]
    events: Events
    output: Output
    interruptions: Interruptions
    escalation: Escalation
    on_progress: Callable[[ProgressReport], None] | None = None
    on_tick: Callable[[], None] | None = None
    watch: WaitingWatch | None = None
    on_waiting: Callable[[WaitingView | None], None] | None = None
    timeout: float | None = None

    def follow(self) -> Outcome:
        """Wait for every rank, and return how it ended."""
        outcome, waiting = Outcome(), set(self.ranks.values())
        deadlines = _Deadlines(started=time.monotonic())
        while waiting:
            self._take(outcome, waiting)
            now = time.monotonic()
            self.output.show(now=now)
            if self.on_tick is not None:
                self.on_tick()
            self._press(outcome, deadlines, now)
            self._look(outcome, waiting, deadlines, now)
            if now > deadlines.give_up_at:
                outcome.stuck = tuple(sorted(waiting))
                break
        self.output.finish()
        return outcome

    def _press(self, outcome: Outcome, deadlines: _Deadlines, now: float) -> None:
        """Answer the person, and force the ranks when it is time, or after a failure."""
        if self.interruptions.count > deadlines.handled:
            deadlines.handled = self.interruptions.count
            deadlines.force_at = now + self.escalation.press(deadlines.handled)
            if self.watch is not None:
                self.watch.hurry(now)
        if self.timeout is not None and now - deadlines.started > self.timeout:
            outcome.timed_out, self.timeout = True, None
            deadlines.force_at = now
        if now >= deadlines.force_at:
            self.escalation.force()
            deadlines.force_at = now + _FORCE_AGAIN_SECONDS
            deadlines.give_up_by(now + _STUCK_SECONDS)
        if outcome.failed:
            deadlines.give_up_by(now + _STUCK_SECONDS)

    def _look(self, outcome: Outcome, waiting: set[int], deadlines: _Deadlines, now: float) -> None:
        """Show where ranks are that wait for each other; stop them if nobody can come any more.

        The forward of a sharded model under ``if rank == 0:`` is how most people meet that.
        """
        if self.watch is None or not waiting or outcome.failed:
            return
        if deadlines.give_up_at < float("inf"):  # they are being forced out
            return
        view = self.watch.look(now, inside=waiting, left=set(outcome.replies))
        if self.watch.hopeless(view):
            outcome.waited, outcome.hopeless, deadlines.force_at = view, True, now
        elif view is not None and deadlines.handled and deadlines.force_at == float("inf"):
            deadlines.force_at = now  # a clean stop was asked for, which this step never reaches
        elif self.on_waiting is not None:
            self.on_waiting(view)
        elif view is not None and (outcome.waited is None or not view.is_like(outcome.waited)):
            self.output.note(waiting_panel.text(view))
        outcome.waited = view or outcome.waited

    def _take(self, outcome: Outcome, waiting: set[int]) -> None:
        """Take the events that are there, waiting a moment for the first.

        Not without end: ranks may say more than can be shown, and an interrupt must be seen.
        """
        until = time.monotonic() + 2 * _TICK_SECONDS
        try:
            event = self.events.get(timeout=_TICK_SECONDS)
            for _ in range(_EVENTS_PER_TICK):
                self._handle(event, outcome, waiting)
                if not waiting or time.monotonic() > until:
                    return
                event = self.events.get_nowait()
        except queue.Empty:
            return

    def _handle(self, event: Event, outcome: Outcome, waiting: set[int]) -> None:
        rank = self.ranks.get(event.engine_id)
        if rank is None:
            return
        match event:
            case Printed() | Displayed() | Cleared():
                self._show(rank, event)
            case Progressed():
                if self.on_progress is not None:
                    self.on_progress(event.report)
                if self.watch is not None and event.report.records.losses:
                    self.watch.moved(time.monotonic())
            case Located():
                if self.watch is not None:
                    self.watch.take(event.report, time.monotonic())
            case Answered(reply=Reply() as reply):
                outcome.replies[rank] = reply
                waiting.discard(rank)
            case Answered(reply=RemoteError(ename="EngineError")):
                return  # ipyparallel noticed a death; the operating system tells how, next
            case Answered(reply=BaseException() as error):
                raise error
            case Died():
                outcome.dead = (*outcome.dead, rank)
                waiting.discard(rank)
                self.escalation.force()

    def _show(self, rank: int, event: Printed | Displayed | Cleared) -> None:
        now = time.monotonic()
        match event:
            case Printed():
                self.output.add(rank, event.stream, event.report, now=now)
            case Displayed():
                shown = Shown(
                    bundle=event.bundle,
                    metadata=event.metadata,
                    display_id=event.display_id,
                    update=event.update,
                )
                self.output.display(rank, shown, now=now)
            case Cleared():
                self.output.clear(rank)


class Interruptions:
    """Counts SIGINT instead of raising, inside a ``with`` in the main thread.

    One ``with`` may stand inside another; the count begins at the outermost.
    """

    def __init__(self) -> None:
        self.count = 0
        self._depth = 0
        self._previous: Any = None
        self._installed = False

    @property
    def active(self) -> bool:
        """Whether a request is under way."""
        return self._depth > 0

    def __enter__(self) -> Interruptions:
        if self._depth == 0:
            self.count = 0
            self._installed = threading.current_thread() is threading.main_thread()
            if self._installed:
                self._previous = signal.signal(signal.SIGINT, self._handle)
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
