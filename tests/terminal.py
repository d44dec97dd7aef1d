"""A terminal, as small as it gets: a screen, what scrolled out of it, and three sequences."""

from __future__ import annotations

import re
import unicodedata

_TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b.|.", re.DOTALL)


class Terminal:
    """Takes what is written to it, and shows what a person would see.

    Args:
        columns, rows: its size.
    """

    def __init__(self, *, columns: int, rows: int) -> None:
        self.size = (columns, rows)
        self._lines: list[str] = [""]
        self._row, self._column = 0, 0

    @property
    def all(self) -> list[str]:
        """Every line, also those that scrolled out of sight, without empty ones at the end."""
        lines = [line.replace("\0", "").rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def resize(self, columns: int, rows: int | None = None) -> None:
        """Make it wider or narrower: lines that are too long break, as terminals do."""
        self.size = (columns, rows or self.size[1])
        broken: list[str] = []
        for line in self._lines:
            pieces = [line[at : at + columns] for at in range(0, max(1, len(line)), columns)]
            broken += pieces
        self._lines = broken
        self._row = len(broken) - 1

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def write(self, text: str) -> int:
        for token in _TOKEN.finditer(text):
            if token[2]:
                self._control(int(token[1] or 1), token[2])
            elif token[0] == "\n":
                self._down()
            elif token[0] == "\r":
                self._column = 0
            else:
                assert token[0].isprintable() or unicodedata.combining(token[0]), repr(token[0])
                self._put(token[0])
        return len(text)

    def _control(self, count: int, letter: str) -> None:
        if letter == "A":
            top = max(0, len(self._lines) - self.size[1])
            self._row = max(top, self._row - count)
        elif letter == "J":
            self._lines[self._row] = self._lines[self._row][: self._column]
            del self._lines[self._row + 1 :]
        elif letter != "m":
            raise AssertionError(f"this terminal knows no CSI {letter}")

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._lines):
            self._lines.append("")

    def _put(self, character: str) -> None:
        if unicodedata.combining(character):
            return  # drawn over the one before
        cells = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if self._column + cells > self.size[0]:
            self._down()
        line = self._lines[self._row].ljust(self._column)
        drawn = character + "\0" * (cells - 1)
        self._lines[self._row] = line[: self._column] + drawn + line[self._column + cells :]
        self._column += cells
