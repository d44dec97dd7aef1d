"""What a cell leaves on a rank: what it printed, and the value of its last expression; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PRINTED_KEY = "fsdp_magic.printed"
"""The key of a ``PrintedReport`` in the content of a stream message."""

LINES, CHARACTERS = 2500, 200_000
"""Of text from one cell: a page still scrolls through it, and a saved notebook still holds it."""

_END_LINES, _END_CHARACTERS = 10, 400


def line_end(line: str) -> str:
    """Return a line, or the end of one that is too long to be shown at the end of a flood."""
    return line if len(line) <= _END_CHARACTERS else f"…{line[1 - _END_CHARACTERS :]}"


def shortened(text: str) -> str:
    """Return a text, or the beginning and the end of one that is too long to be shown."""
    if len(text) <= CHARACTERS and text.count("\n") < LINES:
        return text
    head = "\n".join(text[:CHARACTERS].split("\n", LINES)[:LINES])
    end = text[len(head) :][-_END_LINES * _END_CHARACTERS :]
    tail = "\n".join(map(line_end, end.split("\n")[-_END_LINES:]))
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n… {left_out:,} more characters; bind it to a name, and print a part\n{tail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedReport:
    """What a rank printed on one stream since it last said so.

    Attributes:
        parts: text left for good, and the numbers of progress bars where they begin, in order.
        taken_back: characters at the end of earlier text that turned out to be of a bar.
        bars: number and text of every bar, if any changed; one that is missing keeps its last.
        left_out: lines of the cell, so far, that were not sent.
        log: the file that has all of them; empty while none was left out.
        tail: the last of them, once the cell is over.
    """

    parts: tuple[str | int, ...] = ()
    taken_back: int = 0
    bars: tuple[tuple[int, str], ...] | None = None
    left_out: int = 0
    log: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReport:
    """The value of a cell's last expression.

    Attributes:
        text: its ``repr``, shortened; None if there is none or it ends in ``;``.
        bundle: by MIME type, if it has more to show than text; None: it has shown itself.
        metadata: of the bundle.
    """

    text: str | None = None
    bundle: dict[str, Any] | None = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutput:
    """What a cell left on one rank.

    Attributes:
        rank: the rank.
        stdout, stderr: what it printed, as a terminal would have kept it; of more than 2,500
            lines or 200 kB the beginning and the end, and between them where all of it is.
        result: ``repr`` of the last expression, of one beyond 2,500 lines or 200,000 characters the
            beginning and the end; None if there is none or it ends in ``;``.
    """

    rank: int
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
