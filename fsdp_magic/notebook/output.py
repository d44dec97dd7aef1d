"""KERNEL: what ranks print and display, as one output: labelled by rank, equal things merged.

A whole line, or a display, waits at most 0.2 s for its twins on other ranks; a partial line is
shown after 0.5 s. The order of one rank's things is kept. Lines that ranks rewrite have a live
place of their own. A cell shows 2,500 lines or 200 kB; what comes after is only counted, until
the end of the cell shows the last few lines. The caller brings the time, so tests need no clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_magic.core.cell_output import CHARACTERS, LINES, PrintedReport, shortened
from fsdp_magic.core.units import ranks_named
from fsdp_magic.notebook.kept_text import KeptText
from fsdp_magic.notebook.progress_lines import ProgressLines
from fsdp_magic.notebook.rich_displays import DisplayNames, RichDisplays, Shown
from fsdp_magic.notebook.screen import Screen

TWIN_SECONDS = 0.2
_ONE_MOMENT_SECONDS = 0.05
PARTIAL_SECONDS = 0.5
_COUNT_SECONDS = 2.0
_LAST_LINES = 10
_LOOK_AHEAD_LINES = 50


@dataclass(slots=True, kw_only=True)
class _Line:
    stream: str
    text: str
    since: float

    def is_twin(self, other: _Item) -> bool:
        return isinstance(other, _Line) and self.stream == other.stream and self.text == other.text


@dataclass(slots=True, kw_only=True)
class _Display:
    shown: Shown
    since: float

    def is_twin(self, other: _Item) -> bool:
        return isinstance(other, _Display) and self.shown.is_like(other.shown)


_Item = _Line | _Display


class Output:
    """Merges the output of ranks.

    Args:
        ranks: the ranks that may print.
        screen: where it is shown.
        names: of the displays of earlier cells, which this one may update; None: of none.
    """

    def __init__(
        self, ranks: Sequence[int], *, screen: Screen, names: DisplayNames | None = None
    ) -> None:
        self._screen = screen
        self._ranks = tuple(ranks)
        self._whole: dict[int, deque[_Item]] = {rank: deque() for rank in ranks}
        self._partial: dict[int, _Line | None] = dict.fromkeys(ranks)
        self._kept = {rank: {"stdout": KeptText(), "stderr": KeptText()} for rank in ranks}
        self._progress = ProgressLines(screen)
        self._displays = RichDisplays(screen, names or DisplayNames())
        self._cleared: set[int] = set()
        self._lines_left, self._characters_left = LINES, CHARACTERS
        self._hidden = dict.fromkeys(ranks, 0)
        self._left_out = dict.fromkeys(ranks, 0)
        self._logs: dict[int, str] = {}
        self._counted_at = float("-inf")

    # -- taking

    def add(self, rank: int, stream: str, report: PrintedReport, *, now: float) -> None:
        """Take what a rank printed."""
        self._kept[rank][stream].take(report)
        self._left_out[rank] = report.left_out or self._left_out[rank]
        self._logs[rank] = report.log or self._logs.get(rank, "")
        if report.taken_back:
            self._partial[rank] = None
        if report.bars is not None:
            self._progress.take(rank, stream, report.bars)
        text = "".join(part for part in report.parts if isinstance(part, str))
        if text and self._is_full:
            self._hidden[rank] += text.count("\n")
        elif text:
            self._add_text(rank, stream, text, now)

    def display(self, rank: int, shown: Shown, *, now: float) -> None:
        """Take what a rank displayed; where there is no page, and for text, it is printed."""
        rich = self._screen.is_rich and (set(shown.bundle) != {"text/plain"} or shown.display_id)
        if not rich:
            text = shortened(shown.bundle.get("text/plain", ""))
            self.add(rank, "stdout", PrintedReport(parts=(f"{text}\n",)), now=now)
            return
        self._end_partial(rank)
        after_clear = rank in self._cleared
        self._cleared.discard(rank)
        shown = Shown(
            bundle=shown.bundle,
            metadata=shown.metadata,
            display_id=shown.display_id,
            update=shown.update,
            after_clear=after_clear,
        )
        self._whole[rank].append(_Display(shown=shown, since=now))

    def clear(self, rank: int) -> None:
        """Let what a rank displays next take the place of what it displayed since last time."""
        self._cleared.add(rank)

    def _add_text(self, rank: int, stream: str, text: str, now: float) -> None:
        partial = self._partial[rank]
        if partial is not None and partial.stream != stream:
            self._end_partial(rank)
            partial = None
        joined = text if partial is None else partial.text + text
        *lines, rest = joined.split("\n")
        for line in lines:
            self._whole[rank].append(_Line(stream=stream, text=line, since=now))
        # a line that grows bit by bit is as old as its first bit
        since = now if lines or partial is None else partial.since
        self._partial[rank] = _Line(stream=stream, text=rest, since=since) if rest else None

    # -- showing

    def show(self, *, now: float) -> None:
        """Write every line whose time has come."""
        for rank, partial in self._partial.items():
            if partial is not None and now - partial.since >= PARTIAL_SECONDS:
                self._end_partial(rank)
        while self._show_next(now):
            pass
        if self._is_full and now - self._counted_at >= _COUNT_SECONDS:
            self._counted_at = now
            self._progress.note(self._more_text())
        self._displays.tick(now)
        self._progress.tick(now)
        self._screen.flush()

    def note(self, sentence: str) -> None:
        """Write a sentence of ours at once."""
        self._screen.write("stderr", f"{sentence}\n")
        self._screen.flush()

    def finish(self) -> None:
        """Write everything that is left, and how much was not shown."""
        for rank in self._ranks:
            self._end_partial(rank)
        while self._show_next(float("inf")):
            pass
        self._displays.finish()
        self._complete_logs()
        last = self._last_lines()
        self._progress.finish(self._more_text())
        self._show_last(last)
        self._screen.flush()

    def collected(self, rank: int, stream: str) -> str:
        """Return what a rank printed on a stream, as a terminal would have kept it.

        Of a flood the beginning and the end.
        """
        return self._kept[rank][stream].text()

    def _end_partial(self, rank: int) -> None:
        partial = self._partial[rank]
        if partial is not None:
            self._whole[rank].append(partial)
            self._partial[rank] = None

    def _show_next(self, now: float) -> bool:
        """Show what all ranks have at their head, or the oldest overdue thing."""
        heads = {rank: items[0] for rank, items in self._whole.items() if items}
        if not heads:
            return False
        oldest = min(item.since for item in heads.values())
        # what came at about the same moment is shown in the order of ranks
        first = next(item for item in heads.values() if item.since <= oldest + _ONE_MOMENT_SECONDS)
        complete = len(heads) == len(self._ranks) and all(
            item.is_twin(first) for item in heads.values()
        )
        if not complete and now - oldest < TWIN_SECONDS:
            return False
        chosen = first if complete else self._before_twin(first, heads)
        twins = {rank: item for rank, item in heads.items() if item.is_twin(chosen)}
        for rank in twins:
            self._whole[rank].popleft()
        if isinstance(chosen, _Line):
            self._write(chosen, tuple(twins))
        else:
            self._displays.show(
                {rank: item.shown for rank, item in twins.items() if isinstance(item, _Display)}
            )
        return True

    def _before_twin(self, first: _Item, heads: Mapping[int, _Item]) -> _Item:
        """Return what stands before a twin of the first on another rank, else the first.

        So ranks that print something of their own and then the same meet again.
        """
        for rank, head in heads.items():
            coming = itertools.islice(self._whole[rank], 1, _LOOK_AHEAD_LINES)
            if not head.is_twin(first) and any(item.is_twin(first) for item in coming):
                return head
        return first

    def _write(self, line: _Line, ranks: tuple[int, ...]) -> None:
        text = f"{label(ranks)} {line.text}\n"
        if self._is_full:
            for rank in ranks:
                self._hidden[rank] += 1
            return
        self._lines_left -= 1
        self._characters_left -= len(text)
        self._screen.write(line.stream, text)

    # -- floods

    @property
    def _is_full(self) -> bool:
        return self._lines_left <= 0 or self._characters_left <= 0

    @property
    def _more(self) -> int:
        """Lines that were printed and not shown."""
        return sum(self._hidden.values()) + sum(self._left_out.values())

    def _more_text(self) -> str:
        if not self._more:
            return ""
        logs = [Path(log) for log in self._logs.values() if log]
        if not logs:
            return f"… {self._more:,} more lines"
        # the files of a cell differ in the rank at their end only
        name = logs[0].name.rpartition("-rank")[0] + "-rank*.txt"
        path = logs[0] if len(logs) == 1 else logs[0].with_name(name)
        return f"… {self._more:,} more lines; until the engines end all of it is in {path}"

    def _complete_logs(self) -> None:
        """Write the logs of ranks that sent all they printed, of which not all was shown."""
        for rank, log in self._logs.items():
            if log and self._hidden[rank] and not self._left_out[rank]:
                with suppress(OSError):
                    Path(log).parent.mkdir(mode=0o700, exist_ok=True)
                    Path(log).write_text(
                        self.collected(rank, "stdout") + self.collected(rank, "stderr"),
                        encoding="utf-8",
                        errors="backslashreplace",
                    )

    def _last_lines(self) -> dict[int, list[_Line]]:
        """Return the end of what was not shown, by rank; an engine does not count its own."""
        last: dict[int, list[_Line]] = {rank: [] for rank in self._ranks}
        for rank, streams in self._kept.items():
            if not self._hidden[rank] and not self._left_out[rank]:
                continue
            for stream, kept in streams.items():
                lines = kept.last_lines(_LAST_LINES)
                last[rank] += [_Line(stream=stream, text=line, since=0.0) for line in lines]
            if not self._left_out[rank]:
                last[rank] = last[rank][-self._hidden[rank] :]
                self._hidden[rank] -= len(last[rank])
        return last

    def _show_last(self, last: Mapping[int, Sequence[_Line]]) -> None:
        self._lines_left, self._characters_left = LINES, CHARACTERS
        for rank, lines in last.items():
            self._whole[rank].extend(lines)
        while self._show_next(float("inf")):
            pass


def label(ranks: tuple[int, ...]) -> str:
    """Return the label of a line: ``[rank 1]`` or ``[ranks 0-3]``."""
    return f"[{ranks_named(ranks)}]"
