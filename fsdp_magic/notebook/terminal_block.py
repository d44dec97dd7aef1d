"""KERNEL: a block of lines at the end of a terminal that is drawn again in its place.

The cursor goes up to the first line of the block, and everything from there on is cleared. What
else is written meanwhile (what ranks print, a ``print`` in a person's ``--log`` function, a
warning) first takes the block away, and the next frame comes beneath it. So nothing is written
over, however much is printed. The last frame stays.

Source: the sequences CSI A and CSI J of ECMA-48, which every terminal knows.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from typing import Any, TextIO

_ABOVE = "\x1b[{}A"
_CLEAR_BELOW = "\r\x1b[J"


class TerminalBlock:
    """A block at the end of a terminal; several stand beneath each other.

    Args:
        stream: the terminal, as ``sys.stdout`` is.
    """

    def __init__(self, stream: Any) -> None:
        # where a block stands already, its terminal has a foot
        self._foot = stream.foot if isinstance(stream, _Watched) else _Foot(stream)

    def draw(self, text: str, *, final: bool) -> None:
        """Show a frame in place of the one before; the last one is shown whole and stays."""
        self._foot.draw(self, text, final=final)


class _Foot:
    """All that is drawn again at the end of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._frames: dict[TerminalBlock, list[str]] = {}
        self._widths: list[int] = []  # of the lines that are drawn
        self._watched: dict[str, Any] = {}

    def draw(self, block: TerminalBlock, text: str, *, final: bool) -> None:
        """Draw every block, one of them anew; what is final goes above the rest."""
        columns, rows = self._size()
        lines = text.splitlines()
        left = lines if final else []
        if final:
            self._frames.pop(block, None)
        else:
            self._frames[block] = lines
        shown = [line for frame in self._frames.values() for line in frame]
        # what scrolled out of sight could not be cleared
        shown = [cut(line, columns - 1) for line in shown[: max(1, rows - 1)]]
        drawn = self._erasing(columns) + "".join(f"{line}\n" for line in (*left, *shown))
        self._stream.write(drawn)
        self._stream.flush()
        self._widths = [width(line) for line in shown]
        if not self._frames:
            self._stop_watching()
        elif not self._watched:
            self._start_watching()

    def erase(self) -> None:
        """Take the blocks away, because something else is to be written there."""
        if self._widths:
            self._stream.write(self._erasing(self._size().columns))
            self._stream.flush()
            self._widths = []

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError, AttributeError):
            return shutil.get_terminal_size()
        # a terminal that nobody told its size says 0 × 0
        return size if size.columns and size.lines else shutil.get_terminal_size()

    def _erasing(self, columns: int) -> str:
        """Return what takes all away; a line that a narrower terminal broke is higher."""
        height = sum(max(1, -(-line // max(1, columns))) for line in self._widths)
        return _ABOVE.format(height) + _CLEAR_BELOW if height else ""

    def _start_watching(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            self._watched[name] = (stream, _Watched(stream, self))
            setattr(sys, name, self._watched[name][1])

    def _stop_watching(self) -> None:
        for name, (stream, ours) in self._watched.items():
            if getattr(sys, name) is ours:
                setattr(sys, name, stream)
        self._watched.clear()


class _Watched:
    """A stream in whose way a block may stand."""

    def __init__(self, stream: Any, foot: _Foot) -> None:
        self._stream = stream
        self.foot = foot

    def write(self, text: str) -> int:
        if text:
            self.foot.erase()
        count: int = self._stream.write(text)
        return count

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "dumb") != "dumb"
    except (AttributeError, ValueError):  # no stream, or one that is closed
        return False


def width(text: str) -> int:
    """Return how many columns of a terminal a line takes."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, columns: int) -> str:
    """Return the part of a line that fits into so many columns."""
    if width(text) <= columns:
        return text
    room, kept = columns - 1, ""
    for character in text:
        room -= _columns(character)
        if room < 0:
            break
        kept += character
    return f"{kept}…"


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
