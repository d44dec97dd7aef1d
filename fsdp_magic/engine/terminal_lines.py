"""ENGINE: what a terminal would make of a stream: lines left for good, and lines rewritten.

Progress bars steer a terminal: a carriage return goes to the start of the line, line feeds and
ESC[A move between nested bars, blanks wipe one out. A line that is gone back to becomes a *bar*:
it has a number, and only its newest text counts. All other text passes as it is, at once. So
thousands of redraws are a few lines, and nothing but their state has to leave the engine.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

_ROWS = 64
"""Rows that can be gone back to; a notebook has no screen, so this is its height."""
_BARS, _NEW_BARS = 20, 200
_BAR_CHARACTERS = 500
_COLUMNS = 10_000
"""Of a line that is gone back to; a sequence may ask for any column, and pads the line up to it."""
_MOVES = re.compile(r"\r(?!\n)|\x08|\x1b\[[0-9;]*[ABCDFGHJKf]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TOKENS = re.compile(
    r"\x1b\[(?P<count>[0-9;?]*)(?P<code>[@-~])|\x1b.?|\r\n|[\n\r\x08]|[^\x1b\n\r\x08]+", re.DOTALL
)


@dataclass(slots=True, eq=False)
class _Row:
    text: str = ""
    bar: int | None = None
    returned: bool = False
    """The cursor came back from what was written here; a bar that is drawn returns once more."""
    revived: bool = False
    """A bar that was wiped out, and where something else is written now: an ordinary line."""
    stale: bool = False
    sent: int = 0
    """Characters of an ordinary line that left with an earlier piece of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a piece of text did.

    Attributes:
        parts: text left for good, and numbers of bars where they begin, in order.
        taken_back: characters at the end of earlier text that turned out to be of a bar.
    """

    parts: tuple[str | int, ...]
    taken_back: int = 0


class TerminalLines:
    """The lines of one stream."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._free: list[int] = []
        self._rows = [_Row()]
        self._y = self._x = 0
        self._wrote = False  # on this row, since the cursor came to it
        self._base: _Row | None = None
        self._parts: list[str | int] = []
        self._taken_back = 0
        self._bars: dict[int, str] = {}
        self._told: dict[int, str] = {}

    def feed(self, text: str) -> Change:
        """Take what was printed."""
        self._parts, self._taken_back = [], 0
        row = self._rows[self._y]
        ordinary = row.bar is None and self._base is None and self._y == len(self._rows) - 1
        if ordinary and self._x == len(row.text) and not _MOVES.search(text):
            self._pass(text)
        else:
            for token in _TOKENS.finditer(text):
                self._take(token)
        row = self._rows[-1]
        if row.bar is None:
            self._emit(row.text[row.sent :])
            row.sent = len(row.text)
        return Change(parts=tuple(self._parts), taken_back=self._taken_back)

    def clear(self, *, wait: bool) -> None:
        """Go back to where the last clearing was: what is printed now replaces what came since.

        Args:
            wait: whether the old lines stay until something new is printed.
        """
        if self._base is None or self._base not in self._rows:
            if self._rows[-1].text:
                self._rows.append(_Row())
            self._base = self._rows[-1]
        self._y, self._x = self._rows.index(self._base), 0
        for row in self._rows[self._y :]:
            row.stale = True
        if not wait:
            self._wipe_stale()

    def changed_bars(self) -> tuple[tuple[int, str], ...] | None:
        """Return every bar, oldest first, if any changed since they were last asked for."""
        if self._bars == self._told:
            return None
        bars = tuple((n, text.rstrip()[:_BAR_CHARACTERS]) for n, text in self._bars.items())
        self._keep(_BARS)
        self._told = dict(self._bars)
        return bars

    # -- ordinary text

    def _pass(self, text: str) -> None:
        """Let ordinary text through, and begin a row after each of its lines."""
        text = text.replace("\r\n", "\n")
        *lines, rest = text.rsplit("\n", _ROWS)
        if lines:
            self._emit(text[: len(text) - len(rest)])
            self._rows += [_Row() for _ in lines]
            self._trim()
        row = self._rows[-1]
        row.text += rest
        self._y, self._x = len(self._rows) - 1, len(row.text)

    def _emit(self, text: str) -> None:
        if self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        elif text:
            self._parts.append(text)

    # -- text that moves

    def _take(self, token: re.Match[str]) -> None:
        text, code = token.group(), token.group("code")
        if code is not None:
            self._obey(code, token.group("count"), text)
        elif text in ("\n", "\r\n"):
            if text == "\r\n" and self._rows[self._y].bar is not None:
                self._return()  # not a line's end, but a bar's return before the next row
            self._down()
        elif text == "\r":
            self._return()
        elif text == "\x08":
            self._x = max(0, self._x - 1)
        elif text[0] != "\x1b":
            self._put(text)

    def _obey(self, code: str, count: str, sequence: str) -> None:
        number = min(int(count[:9]), _COLUMNS) if count.isdecimal() else 1
        row = self._rows[self._y]
        if code == "A":
            self._y, self._wrote = max(0, self._y - number), False
        elif code == "B":
            self._y, self._wrote = min(len(self._rows) - 1, self._y + number), False
        elif code == "G":
            self._x = max(0, number - 1)
        elif code == "C":
            self._x = min(self._x + number, _COLUMNS)
        elif code == "D":
            self._x = max(0, self._x - number)
        elif code == "K" and row.text:
            kept = "" if count == "2" else row.text[: self._x]
            if row.bar is None and kept != row.text:
                self._become_bar(row)
            self._set(row, kept)
        elif code == "m" and row.bar is None and self._x == len(row.text):
            self._put(sequence)  # a colour, on a line that may be left as it is

    def _return(self) -> None:
        row = self._rows[self._y]
        if row.text and row.bar is None:
            self._become_bar(row)
        row.revived = row.revived and not row.text.strip()
        row.returned = self._x > 0 and self._wrote
        self._x = 0
        if not row.text and row.bar is None:
            self._become_bar(row)

    def _put(self, text: str) -> None:
        self._wipe_stale()
        self._wrote = True
        row = self._rows[self._y]
        last = self._y == len(self._rows) - 1
        if row.bar is None and last and self._x == len(row.text) and self._base is None:
            row.text += text
            self._x = len(row.text)
            return
        if row.bar is None:
            self._become_bar(row)
        if row.text and not row.text.strip():
            row.revived = row.returned and bool(text.strip())
        before = row.text.ljust(self._x)
        self._set(row, before[: self._x] + text + before[self._x + len(text) :])
        self._x = min(self._x + len(text), _COLUMNS)

    def _down(self) -> None:
        self._wipe_stale()
        row = self._rows[self._y]
        if row.revived and row.bar is not None and row.text.strip() and self._base is None:
            self._free.append(row.bar)
            self._bars[row.bar] = ""  # its place waits for the next bar
            self._emit(f"{row.text.rstrip()}\n")
            row.bar, row.revived = None, False
        elif row.bar is not None and not row.text and self._y == len(self._rows) - 1:
            self._drop_empty(row)
        elif row.bar is None and self._y == len(self._rows) - 1:
            if self._base is not None:
                self._become_bar(row)
            else:
                self._emit(f"{row.text[row.sent :]}\n")
        self._x, self._wrote = 0, False
        self._y += 1
        if self._y == len(self._rows):
            self._rows.append(_Row())
            self._trim()

    def _drop_empty(self, row: _Row) -> None:
        """Let a line that was returned on but never written be an empty line."""
        assert row.bar is not None
        if self._parts and self._parts[-1] == row.bar:
            self._parts.pop()
        self._bars.pop(row.bar, None)
        row.bar = None
        self._emit("\n")

    def _become_bar(self, row: _Row) -> None:
        """Make a line a bar; what was passed of it as ordinary text is taken back."""
        if self._y == len(self._rows) - 1:
            self._taken_back += row.sent
        row.text = _COLOUR.sub("", row.text[:_COLUMNS])
        self._x = min(self._x, _COLUMNS)
        row.bar = self._free.pop(0) if self._free else next(self._numbers)
        row.sent = 0
        self._bars.pop(row.bar, None)  # one that is used again stands where it now is
        self._bars[row.bar] = row.text
        self._parts.append(row.bar)
        self._keep(_NEW_BARS)

    def _set(self, row: _Row, text: str) -> None:
        row.text = text = text[:_COLUMNS]
        if row.bar in self._bars:
            assert row.bar is not None
            self._bars[row.bar] = text

    def _wipe_stale(self) -> None:
        for row in self._rows:
            if row.stale:
                row.stale = False
                self._set(row, "")

    def _trim(self) -> None:
        del self._rows[: max(0, len(self._rows) - _ROWS)]
        self._y = min(self._y, len(self._rows) - 1)
        if self._base is not None and self._base not in self._rows:
            self._base = None  # more was printed than can be gone back to

    def _keep(self, count: int) -> None:
        """Forget the oldest bars: whoever was told of them keeps their last state."""
        for number in list(self._bars)[: max(0, len(self._bars) - count)]:
            del self._bars[number]
