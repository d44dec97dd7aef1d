"""KERNEL: the live place under a cell, for the lines that ranks rewrite.

Drawn at most four times a second, and never shorter than before: a line stays where it is when
its bar is done, so that nothing below it moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_magic.notebook.screen import Screen
from fsdp_magic.panels import progress_lines as panel
from fsdp_magic.panels.progress_lines import ProgressLine

_FRAME_SECONDS = 0.25
_KEPT = 200


class ProgressLines:
    """The rewritten lines of all ranks.

    Args:
        screen: where they are shown.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._bars: dict[tuple[str, int], dict[int, str]] = {}
        self._apart: set[tuple[str, int]] = set()
        self._note = ""
        self._changed = False
        self._drawn_at = float("-inf")

    def take(self, rank: int, stream: str, bars: Sequence[tuple[int, str]]) -> None:
        """Take the newest state of a rank's bars; those that are missing keep theirs."""
        known = self._bars.setdefault((stream, rank), {})
        for number, text in bars:
            known.pop(number, None)  # in the order of the newest message
            known[number] = text
        for number in list(known)[: max(0, len(known) - _KEPT)]:
            del known[number]
        self._changed = True

    def note(self, text: str) -> None:
        """Show a line of ours below, or none."""
        self._changed = self._changed or text != self._note
        self._note = text

    def tick(self, now: float) -> None:
        """Draw if something changed and a quarter of a second has passed."""
        if self._changed and now - self._drawn_at >= _FRAME_SECONDS:
            self._drawn_at = now
            self._draw(final=False)

    def finish(self, note: str) -> None:
        """Draw the state that stays."""
        self._note = note
        if self._bars or note:
            self._draw(final=True)

    def _draw(self, *, final: bool) -> None:
        self._changed = False
        lines = self.lines()
        if final:
            lines = [line for line in lines if line.text.strip()]
        self._screen.progress(lines, [self._note] if self._note else [], final=final)

    def lines(self) -> list[ProgressLine]:
        """Return every line, those of ranks that are alike as one."""
        found: list[ProgressLine] = []
        for stream in ("stderr", "stdout"):
            by_rank = {
                rank: list(bars.values())
                for (name, rank), bars in sorted(self._bars.items())
                if name == stream
            }
            for place in range(max(map(len, by_rank.values()), default=0)):
                states = {
                    rank: texts[place] for rank, texts in by_rank.items() if place < len(texts)
                }
                found += self._merged(stream, place, states)
        return found

    def _merged(self, stream: str, place: int, states: Mapping[int, str]) -> list[ProgressLine]:
        """Merge one line of the ranks; texts that have differed once stay apart for good.

        Else the block would grow and shrink with every chance likeness.
        """
        lines = panel.merged(states, apart=(stream, place) in self._apart)
        if len(lines) > 1 and not all(panel.is_bar(text) for text in states.values() if text):
            self._apart.add((stream, place))
            lines = panel.merged(states, apart=True)
        return lines
