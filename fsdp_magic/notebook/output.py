"""KERNEL: what ranks print, as one text: labelled by rank, equal lines merged.

A whole line waits at most 0.2 s for its twins on other ranks; a partial line is shown after
0.5 s. The order of one rank's lines is kept. The caller brings the time, so tests need no clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_magic.core.units import ranks_text

TWIN_SECONDS = 0.2
PARTIAL_SECONDS = 0.5
_LOOK_AHEAD_LINES = 50


@dataclass(slots=True, kw_only=True)
class _Line:
    stream: str
    text: str
    since: float

    def is_twin(self, other: _Line) -> bool:
        return self.stream == other.stream and self.text == other.text


class Output:
    """Merges the output of ranks.

    Args:
        ranks: the ranks that may print.
        write: called with a stream's name and a labelled text.
    """

    def __init__(self, ranks: Sequence[int], *, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._ranks = tuple(ranks)
        self._whole: dict[int, deque[_Line]] = {rank: deque() for rank in ranks}
        self._partial: dict[int, _Line | None] = dict.fromkeys(ranks)
        self.text: dict[int, dict[str, list[str]]] = {
            rank: {"stdout": [], "stderr": []} for rank in ranks
        }

    def add(self, rank: int, stream: str, text: str, *, now: float) -> None:
        """Take what a rank printed."""
        self.text[rank][stream].append(text)
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

    def show(self, *, now: float) -> None:
        """Write every line whose time has come."""
        for rank, partial in self._partial.items():
            if partial is not None and now - partial.since >= PARTIAL_SECONDS:
                self._end_partial(rank)
        while self._show_next(now):
            pass

    def finish(self) -> None:
        """Write everything that is left."""
        for rank in self._ranks:
            self._end_partial(rank)
        while self._show_next(float("inf")):
            pass

    def collected(self, rank: int, stream: str) -> str:
        """Return everything that a rank printed on a stream."""
        return "".join(self.text[rank][stream])

    def _end_partial(self, rank: int) -> None:
        partial = self._partial[rank]
        if partial is not None:
            self._whole[rank].append(partial)
            self._partial[rank] = None

    def _show_next(self, now: float) -> bool:
        """Write one line that all ranks have at their head, or the oldest overdue one."""
        heads = {rank: lines[0] for rank, lines in self._whole.items() if lines}
        if not heads:
            return False
        first = min(heads.values(), key=lambda line: line.since)
        complete = len(heads) == len(self._ranks) and all(
            line.is_twin(first) for line in heads.values()
        )
        if not complete and now - first.since < TWIN_SECONDS:
            return False
        chosen = first if complete else self._before_twin(first, heads)
        twins = tuple(rank for rank, line in heads.items() if line.is_twin(chosen))
        for rank in twins:
            self._whole[rank].popleft()
        self._write(chosen.stream, f"{self.label(twins)} {chosen.text}\n")
        return True

    def _before_twin(self, first: _Line, heads: Mapping[int, _Line]) -> _Line:
        """Return a line that stands before a twin of the first on another rank, else the first.

        So ranks that print something of their own and then the same meet again.
        """
        for rank, head in heads.items():
            coming = itertools.islice(self._whole[rank], 1, _LOOK_AHEAD_LINES)
            if not head.is_twin(first) and any(line.is_twin(first) for line in coming):
                return head
        return first

    def label(self, ranks: tuple[int, ...]) -> str:
        """Return the label of a line: ``[rank 1]`` or ``[ranks 0-3]``."""
        return f"[rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}]"
