"""KERNEL: whether the ranks of a request wait for each other, and where each of them is.

Engines say nothing unasked. When a request has shown no progress for a while they are asked,
about once a second, by a word of the shared page; their service threads answer. A rank that does
not answer is looked up in /proc, and asked for its stack by a signal.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_magic.core.page import Page
from fsdp_magic.core.units import ranks_named
from fsdp_magic.core.whereabouts import Whereabouts, WhereReport
from fsdp_magic.notebook.stacks import Stacks
from fsdp_magic.panels.waiting import WaitingView

_QUIET_SECONDS = 2.0
"""How long a request may show no progress before the ranks are asked."""
_ASK_SECONDS = 1.0
_SILENT_SECONDS = 2.0
"""How long a rank may take to say where it is."""
_STACK_SECONDS = 0.2
"""How long one may take to write its stack."""
WAIT_SECONDS = 5.0
"""How long a rank may wait for others before a person is told."""
_HURRIED_SECONDS = 1.0
"""The same once the person has pressed stop."""

SILENT = (
    "is stopped by a signal or a debugger",
    "is in C code that does not return to Python",
    "has ended",
)
"""Why a rank may not say where it is."""


@dataclass(slots=True, kw_only=True)
class WaitingWatch:
    """Looks after the ranks of one request.

    Attributes:
        page: where they are asked.
        stacks: where one that does not answer is asked for its line.
        wait_seconds: how long one may wait for others before a person is told.
    """

    page: Page
    stacks: Stacks
    wait_seconds: float = field(default_factory=lambda: WAIT_SECONDS)
    _moved_at: float | None = None
    _asked_at: float = float("-inf")
    _left: int = 0
    _left_at: float = float("inf")
    _valid_from: int = 0
    _view: WaitingView | None = None
    _reports: dict[int, WhereReport] = field(default_factory=dict)
    _heard_at: dict[int, float] = field(default_factory=dict)

    def moved(self, now: float) -> None:
        """Note that there was progress; what ranks have said before is old."""
        self._moved_at = now
        self._forget()

    def hurry(self, now: float) -> None:
        """Look sooner: the person wants the end, which a rank that waits cannot reach by itself.

        What is known already stands; else the ranks have as long as that to move.
        """
        self.wait_seconds = min(self.wait_seconds, _HURRIED_SECONDS)
        if self._view is None:
            self.moved(now)

    def take(self, report: WhereReport, now: float) -> None:
        """Take a rank's answer."""
        if report.number < self._valid_from:
            return
        self._reports[report.rank] = report
        self._heard_at[report.rank] = now

    def look(self, now: float, *, inside: Set[int], left: Set[int]) -> WaitingView | None:
        """Return where the ranks are if they wait for each other; ask them when it is time.

        Args:
            now: ``time.monotonic``.
            inside: ranks that still run.
            left: ranks that have finished.
        """
        self._moved_at = now if self._moved_at is None else self._moved_at
        if len(left) != self._left:
            self._left, self._left_at = len(left), now
            self._forget()  # a rank may have waited for one that has come and left since
        if now - self._moved_at < min(_QUIET_SECONDS, self.wait_seconds):
            return None
        if now - self._asked_at >= min(_ASK_SECONDS, self.wait_seconds / 4):
            self._asked_at = now
            self.page.ask_where()
            for rank in inside:
                self._heard_at.setdefault(rank, now)
        known = {rank: self._place(rank, now) for rank in inside}
        if any(where is None for where in known.values()):
            return None
        if not self._of_one_moment(known):
            return self._view
        self._view = None
        if self._worth_telling(known, now):
            places: dict[int, Whereabouts | None] = known | dict.fromkeys(left)
            hint = _hint(places, left)
            self._view = WaitingView(places=dict(sorted(places.items())), hint=hint)
        return self._view

    def _of_one_moment(self, places: Mapping[int, Whereabouts | None]) -> bool:
        """Return whether the ranks that answer have answered the same question last."""
        answering = [rank for rank, w in places.items() if w is not None and w.doing not in SILENT]
        return len({self._reports[rank].number for rank in answering}) <= 1

    def _worth_telling(self, places: Mapping[int, Whereabouts | None], now: float) -> bool:
        """Return whether a rank waits too long, or does not answer while others have left."""
        inside = [where for where in places.values() if where is not None]
        waited = max((where.seconds for where in inside if _waits(where)), default=0.0)
        silent = any(where.doing in SILENT for where in inside)
        return waited >= self.wait_seconds or (silent and now - self._left_at >= self.wait_seconds)

    def _forget(self) -> None:
        self._valid_from = self.page.question + 1
        self._view = None
        self._reports.clear()
        self._heard_at.clear()

    def hopeless(self, view: WaitingView | None) -> bool:
        """Return whether every rank that still runs waits for others, at the same moment.

        Nothing can ever free them: whoever could come waits too, or has left.
        """
        inside = [] if view is None else [w for w in view.places.values() if w is not None]
        return bool(inside) and all(
            w.missing and not w.is_message and w.seconds >= self.wait_seconds for w in inside
        )

    def _place(self, rank: int, now: float) -> Whereabouts | None:
        """Return where a rank is; None: it has still time to say."""
        report, heard = self._reports.get(rank), self._heard_at.get(rank, now)
        silent = now - heard
        if silent < _SILENT_SECONDS:
            return None if report is None else report.where
        doing = _state(self.stacks.pids[rank])
        line = self.stacks.line(rank, now) if doing == SILENT[1] else None
        if silent < _SILENT_SECONDS + _STACK_SECONDS:
            return None
        return Whereabouts(line=line, doing=doing, seconds=now - heard)


def _waits(where: Whereabouts | None) -> bool:
    return where is not None and bool(where.missing or where.is_message)


def _hint(places: Mapping[int, Whereabouts | None], left: Set[int]) -> str:
    waiting = tuple(rank for rank, where in places.items() if _waits(where))
    if left and waiting:
        return (
            f"{ranks_named(tuple(left))} will not come: what needs every rank, such as "
            "a sharded model's forward, must run on every rank; press stop to end the cell"
        )
    return "it goes on when the others come; press stop to end it"


def _state(pid: int) -> str:
    """Return why an engine may not answer.

    Source: the third field of /proc/PID/stat (proc(5)).
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return SILENT[-1]
    stopped, endless, _ = SILENT
    return stopped if state in ("T", "t") else endless
