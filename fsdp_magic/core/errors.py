"""The exceptions of the package; pure, the same in every process.

::

    FsdpError
    ├── UsageError                 an option, a value or a name that cannot work
    ├── CellFailedError            a cell raised on at least one rank
    │   ├── OutOfMemoryOnRankError     ... because a device was full
    │   └── RanksDivergedError         ... because the ranks did different things
    └── EngineDiedError            an engine's process is gone

IPython prints a full traceback for any exception, also for subclasses of its own UsageError.
An exception with ``_render_traceback_`` is asked for its lines instead, so each of ours says
what happened in its own words and nothing of our frames is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_magic.core.cell_output import CellOutput
    from fsdp_magic.core.reply import Failure


class FsdpError(Exception):
    """Anything this package raises on purpose.

    Attributes:
        run: the ``Run`` that was under way, when there was one.
    """

    run: Any = None

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return str(self).splitlines() or [type(self).__name__]


class UsageError(FsdpError):
    """What was typed cannot work; nothing was changed."""


class CellFailedError(FsdpError):
    """A cell raised on at least one rank.

    Attributes:
        ranks: the ranks that raised on their own (not those released because a peer failed).
        outputs: what every rank printed and returned until then, by position.
        exceptions: the failure of each rank in ``ranks``: type, message and traceback as text.
        rendered: the message as IPython shows it: the same lines, with headings that stand out.
        summary: the same in a few words; empty: its first line is short enough.
        is_torn: whether some ranks had updated weights that others had not.
    """

    summary: str = ""
    is_torn: bool = False

    def __init__(
        self,
        message: str,
        *,
        exceptions: Mapping[int, Failure],
        outputs: Sequence[CellOutput] = (),
        rendered: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.rendered = tuple(rendered)
        self.exceptions = dict(exceptions)
        self.ranks = tuple(sorted(self.exceptions))
        self.outputs = tuple(outputs)

    @property
    def is_refusal(self) -> bool:
        """Whether a rank refused the cell, which its message says in one line."""
        return any(failure.kind == "usage" for failure in self.exceptions.values())

    def add_line(self, line: str) -> None:
        """Add a line at the end."""
        self.args = (f"{self}\n{line}",)
        if self.rendered:
            self.rendered = (*self.rendered, line)

    def _render_traceback_(self) -> list[str]:
        return list(self.rendered) or super()._render_traceback_()


class OutOfMemoryOnRankError(CellFailedError):
    """A device was full on at least one rank; what the cell leaves no name for is free again."""


class RanksDivergedError(CellFailedError):
    """Ranks did different things where all must do the same; seen before any data was mixed."""


class EngineDiedError(FsdpError):
    """An engine's process ended while it was needed.

    Attributes:
        rank: the rank it had; None if it died before it got one.
        host: where it ran.
        signal: the number of the signal that ended it; None if it exited by itself.
    """

    def __init__(
        self, message: str, *, rank: int | None, host: str, signal: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.signal = signal


class CellInterrupted(KeyboardInterrupt):
    """The person interrupted a cell; every rank has stopped.

    Attributes:
        run: the ``Run`` that was under way, when there was one.
        torn: what is to be said if some ranks had updated weights that others had not.
    """

    run: Any = None
    torn: str = ""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [str(self)]
