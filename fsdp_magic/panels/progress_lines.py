"""The lines that cells rewrite, progress bars above all, as one block; pure.

Each line belongs to one rank or to several. Ranks that work through the same thing are never at
the same place at the same moment, so their bars are told by what they are called and how long
they are: one line stands for all, that of the rank that is furthest behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_magic.core.units import ranks_named
from fsdp_magic.panels.parts import escape, plain

_BAR = re.compile(
    r"^(?P<name>.*?) *(?:\d+%\|.*\| *)?(?P<count>\d[\d.]*[kMGTP]?)"
    r"(?P<total>/\S+|[^\s/\d]\S*) \[.*\]"
)
_TIMING = re.compile(r" *\[[^\[\]]*\] *$")
_SHOWN_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLine:
    """The newest state of a line. ``ranks`` that share it, sorted; ``text`` as printed."""

    ranks: tuple[int, ...]
    text: str

    @property
    def labelled(self) -> str:
        """The line as it is shown."""
        return f"[{ranks_named(self.ranks)}] {self.text}"


def merged(states: Mapping[int, str], *, apart: bool = False) -> list[ProgressLine]:
    """Return one line of each rank with those that are the same merged.

    Args:
        states: text by rank.
        apart: merge bars that are named alike only; other texts stay by rank.
    """
    groups: dict[object, list[int]] = {}
    for rank, text in states.items():
        groups.setdefault(_identity(rank, text, apart=apart), []).append(rank)
    return [_line({rank: states[rank] for rank in ranks}) for ranks in groups.values()]


def is_bar(text: str) -> bool:
    """Return whether a line is a progress bar that says what it counts."""
    return _BAR.match(plain(text)) is not None


def html(lines: Sequence[ProgressLine], *, notes: Iterable[str] = ()) -> str:
    """Return the lines as a block; ``notes`` are lines of ours below it."""
    content = "\n".join(escape(line) for line in (*_shown(lines), *notes))
    return (
        # as printed lines stand and look beside it
        '<pre style="margin:0;padding:0 0 0 8px;border:0;background:transparent;color:inherit;'
        f'font-size:13px;line-height:1.3;white-space:pre;overflow-x:auto">{content}</pre>'
    )


def text(lines: Sequence[ProgressLine], *, notes: Iterable[str] = ()) -> str:
    """Return the same as text; see ``html``."""
    return "\n".join(plain(line) for line in (*_shown(lines), *notes))


def _shown(lines: Sequence[ProgressLine]) -> list[str]:
    """Return the newest lines; where there are many, a word on the others comes first."""
    more = len(lines) - _SHOWN_LINES
    if more <= 0:
        return [line.labelled for line in lines]
    return [f"… {more + 1} lines above", *(line.labelled for line in lines[more + 1 :])]


def _identity(rank: int, text: str, *, apart: bool) -> object:
    bar = _BAR.match(plain(text))
    if bar is not None:
        return bar["name"], bar["total"]
    return rank if apart and text else _TIMING.sub("", text)


def _line(states: Mapping[int, str]) -> ProgressLine:
    """Return the state of the rank that is furthest behind, and how far the first one is."""
    bars = {rank: bar for rank, text in states.items() if (bar := _BAR.match(plain(text)))}
    ranks = tuple(sorted(states))
    if len(bars) < len(states):
        return ProgressLine(ranks=ranks, text=states[ranks[0]])
    behind = min(ranks, key=lambda rank: _count(bars[rank]))
    ahead = max(ranks, key=lambda rank: _count(bars[rank]))
    text = states[behind]
    if _count(bars[ahead]) > _count(bars[behind]):
        text = f"{text}  rank {ahead}: {bars[ahead]['count']}"
    return ProgressLine(ranks=ranks, text=text)


def _count(bar: re.Match[str]) -> float:
    count: str = bar["count"]
    power = "kMGTP".find(count[-1]) + 1
    return float(count.rstrip("kMGTP")) * 10.0 ** (3 * power)
