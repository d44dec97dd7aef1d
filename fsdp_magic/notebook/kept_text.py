"""KERNEL: what a rank printed on one stream, as a terminal would have kept it."""

from __future__ import annotations

from fsdp_magic.core.cell_output import PrintedReport, line_end

_LIMIT = 1_000_000
"""Characters. An engine sends less, unless one line is longer."""


class KeptText:
    """Text and the last state of each progress bar, in the order in which they began."""

    def __init__(self) -> None:
        self._pieces: list[str | int] = []
        self._bars: dict[int, str] = {}
        self._size = 0
        self.left_out = 0
        self._log = self._tail = ""

    def take(self, report: PrintedReport) -> None:
        """Take what was printed."""
        self._take_back(report.taken_back)
        for part in report.parts:
            if isinstance(part, int):
                if part in self._pieces:  # one that is used again stands where it now is
                    self._pieces.remove(part)
                self._pieces.append(part)
            elif self._size < _LIMIT:
                self._size += len(part)
                self._pieces.append(part)
            else:
                self.left_out += part.count("\n")
        self._bars.update(report.bars or ())
        if report.tail:
            self.left_out += report.left_out
            self._log, self._tail = report.log, report.tail

    def text(self) -> str:
        """Return it as one text; a line tells where the middle of a long one is."""
        bars = {number: f"{text.rstrip()}\n" for number, text in self._bars.items() if text.strip()}
        head = "".join(p if isinstance(p, str) else bars.get(p, "") for p in self._pieces)
        if not self.left_out and not self._tail:
            return head
        between = "" if head.endswith("\n") or not head else "\n"
        where = f"; all of it is in {self._log}" if self._log else ""
        more = f"{self.left_out:,} more lines" if self.left_out else "more"
        return f"{head}{between}… {more}{where}\n{self._tail}"

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines, of long ones the end; of a flood none of its beginning."""
        return [line_end(line) for line in (self._tail or self.text()).splitlines()[-count:]]

    def _take_back(self, count: int) -> None:
        while count and self._pieces and isinstance(last := self._pieces[-1], str):
            kept = last[:-count]
            count -= len(last) - len(kept)
            self._pieces.pop()
            if kept:
                self._pieces.append(kept)
