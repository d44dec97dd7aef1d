"""Where ranks are that wait for each other: a table, and the sentence of ranks that diverged; pure.

What a rank does comes first, because it says whom it waits for; on a narrow page the line of the
cell stands beneath it, and is cut off before what it does is.

Ranks that are in the same place stand together; of those the one that waits longest gives the
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdp_magic.core.reply import Failure
from fsdp_magic.core.units import ranks_named, ranks_text, seconds_text
from fsdp_magic.core.whereabouts import Whereabouts
from fsdp_magic.panels.parts import (
    FIRST,
    NUMBERS,
    cell,
    escape,
    head_cell,
    notes_html,
    notes_text,
    one_line,
    row,
    shortened,
    text_table,
)
from fsdp_magic.panels.parts import table as html_table

_HEAD = ("rank", "what it does", "line of the cell", "since")
_MOST_ROWS = 8
_LINE, _DEED = 60, 90
_MOST_DEEDS = 4
_SAME_ORDER = (
    "every rank must run the same parts of a sharded model, and the same collectives, in the same "
    "order: make what it decides by the same on every rank"
)
DIVERGED, HOPELESS = "the ranks diverged", "the ranks waited for what could never come"
BACKWARD = "backward"
"""What stands in place of a line between two runs of a training cell."""
LEFT = "has left the cell"
COMPUTES = "computes"
_GONE_ON = "the ranks have gone on since"
_FADED = "opacity:.45"
_CUT = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
_DEED_BOX = "flex:1 1 300px;min-width:0;white-space:normal;overflow-wrap:anywhere"
_LINE_BOX = f"flex:1 1 300px;min-width:0;{_CUT}"
_SINCE = f"text-align:right;vertical-align:top;{NUMBERS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingView:
    """Where ranks are.

    Attributes:
        places: by rank; None: it has left the cell.
        hint: a sentence beneath.
    """

    places: Mapping[int, Whereabouts | None]
    hint: str = ""

    def is_like(self, other: WaitingView) -> bool:
        """Return whether every rank is where it is in another one, however long."""
        return _without_time(self.places) == _without_time(other.places)


def text(view: WaitingView) -> str:
    """Return the table as text."""
    lines = text_table([_HEAD, *_rows(view)], left=3)
    return "\n".join([*lines, *notes_text(_hints(view))])


def html(view: WaitingView, *, is_over: bool = False) -> str:
    """Return the table as HTML, for a place inside a panel.

    Args:
        view: where the ranks are.
        is_over: whether they have gone on since: it is faded then, and keeps its room.
    """
    rank, deed, line, since = _HEAD
    head = (
        head_cell(rank, style=FIRST)
        + head_cell(_beside(deed, line), style=_WIDE)
        + head_cell(since, right=True)
    )
    rows = [_row_html(*values) for values in _rows(view)]
    fade = f";{_FADED}" if is_over else ""
    hints = [_GONE_ON] if is_over else _hints(view)
    return f'<div style="margin-top:6px{fade}">{html_table(head, rows)}</div>{notes_html(hints)}'


_WIDE = "width:100%;max-width:0;"
"""Style of the cell that takes what the others leave, and is never wider than that."""


def _row_html(rank: str, deed: str, line: str, since: str) -> str:
    return row(
        cell(escape(rank), style=f"{FIRST}vertical-align:top")
        + cell(_beside(deed, line), style=_WIDE)
        + cell(escape(since), style=_SINCE)
    )


def _beside(deed: str, line: str) -> str:
    """Return two texts side by side, on a narrow page one beneath the other."""
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:0px 12px">'
        f'<div style="{_DEED_BOX}">{escape(deed)} </div>'
        f'<div style="{_LINE_BOX}" title="{escape(line)}">{escape(line)} </div></div>'
    )


def summary(view: WaitingView) -> str:
    """Return who waits for whom, in a few words for the line of a log."""
    waits = [
        f"{ranks_named(ranks)} {'wait' if len(ranks) > 1 else 'waits'} "
        f"for {ranks_named(where.missing)}"
        for where, ranks, _ in _together(view)
        if where is not None and where.missing
    ]
    return ", ".join(waits[:_MOST_DEEDS])


def diverged(failures: Mapping[int, Failure]) -> str:
    """Return the sentence of ranks that diverged; empty: they have not.

    Args:
        failures: of every rank that failed, the released ones too.
    """
    for rank in sorted(failures):
        where = failures[rank].where
        if failures[rank].kind != "diverged" or where is None:
            continue
        peer = where.missing[0]
        other = failures[peer].where if peer in failures else None
        deeds = {rank: _deed_of(rank, where), peer: _deed_of(peer, other)}
        ahead = _ran_more(rank, where, peer, other)
        return (
            f"{DIVERGED}: {', '.join(deeds[each] for each in sorted(deeds))};\n{ahead}{_SAME_ORDER}"
        )
    return ""


def _ran_more(rank: int, where: Whereabouts, peer: int, other: Whereabouts | None) -> str:
    """Return that one rank ran more forwards, when the other is in its backward already.

    The line where it is need not be the guilty one: a forward that it alone ran above passes for
    the one that the other ran then.
    """
    if other is None or (where.source == BACKWARD) == (other.source == BACKWARD):
        return ""
    more, less = (rank, peer) if other.source == BACKWARD else (peer, rank)
    return (
        f"rank {less} is in its backward already, so rank {more} has run more of a forward, in "
        "that line or above it;\n"
    )


def hopeless(view: WaitingView) -> str:
    """Return the sentence of ranks that all wait for others, which can never come."""
    deeds = [
        f"{_each(ranks)} {one_line(where.doing)}{_in_line(where)}"
        for where, ranks, _ in _together(view)
        if where is not None
    ]
    told = ", ".join([*deeds[:_MOST_DEEDS], *(["…"] if len(deeds) > _MOST_DEEDS else [])])
    left = tuple(rank for rank, where in view.places.items() if where is None)
    if not left:
        return f"{told}: they wait for each other, and none can go on;\n{_SAME_ORDER}"
    has = "have" if len(left) > 1 else "has"
    return (
        f"{told}, and {ranks_named(left)} {has} left the cell and will never come;\n"
        "what needs every rank, such as a sharded model's forward, must run on every rank"
    )


def _each(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {ranks_text(ranks)}"


def _deed_of(rank: int, where: Whereabouts | None) -> str:
    if where is None or not where.doing:
        return f"rank {rank} does something else"
    return f"rank {rank} {one_line(where.doing)}{_in_line(where)}"


def _in_line(where: Whereabouts) -> str:
    if where.line is None:
        return f" (in {one_line(where.source)})" if where.source else ""
    return f" (line {where.line} of the cell: {shortened(where.source, _LINE)})"


def _hints(view: WaitingView) -> list[str]:
    return [view.hint] if view.hint else []


def _without_time(places: Mapping[int, Whereabouts | None]) -> dict[int, Whereabouts | None]:
    return {rank: w if w is None else replace(w, seconds=0.0) for rank, w in places.items()}


def _rows(view: WaitingView) -> list[tuple[str, str, str, str]]:
    places = _together(view)
    rows = [_row(*place) for place in places]
    if len(rows) > _MOST_ROWS:
        rest = sum(len(ranks) for _, ranks, _ in places[_MOST_ROWS:])
        rows = [*rows[:_MOST_ROWS], (f"{rest} more", "", "", "")]
    return rows


def _together(view: WaitingView) -> list[tuple[Whereabouts | None, tuple[int, ...], float]]:
    """Return each place with its ranks, and how long one of them has been there at most."""
    ranks: dict[Whereabouts | None, list[int]] = {}
    longest: dict[Whereabouts | None, float] = {}
    for rank, where in sorted(view.places.items()):
        key = None if where is None else replace(where, seconds=0.0)
        ranks.setdefault(key, []).append(rank)
        longest[key] = max(longest.get(key, 0.0), 0.0 if where is None else where.seconds)
    return [(where, tuple(on), longest[where]) for where, on in ranks.items()]


def _row(
    where: Whereabouts | None, ranks: tuple[int, ...], seconds: float
) -> tuple[str, str, str, str]:
    label = ranks_text(ranks)
    if where is None:
        return label, LEFT if len(ranks) == 1 else LEFT.replace("has", "have"), "", ""
    line = shortened(where.source, _LINE)
    if where.line is not None:
        line = f"{where.line}: {line}".removesuffix(": ")
    if where.inner:
        line += f" ({shortened(where.inner, 40)})"
    deed = one_line(where.doing) or COMPUTES
    if where.missing:
        deed += f", waits for {ranks_named(where.missing)}"
    return label, shortened(deed, _DEED), line, seconds_text(seconds) if seconds else ""
