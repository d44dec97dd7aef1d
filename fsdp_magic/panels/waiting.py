"""Where ranks are that wait for each other: a table, and the sentence of ranks that diverged; pure.

Ranks that are in the same place stand together; of those the one that waits longest gives the
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdp_magic.core.reply import Failure
from fsdp_magic.core.units import ranks_text, seconds_text
from fsdp_magic.core.whereabouts import Whereabouts
from fsdp_magic.panels.parts import (
    FIRST,
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

_HEAD = ("rank", "line of the cell", "what it does", "since")
_MOST_ROWS = 8
_LINE, _DEED = 60, 90
_MOST_DEEDS = 4
_SAME_ORDER = (
    "every rank must run the same parts of a sharded model, and the same collectives, in the same "
    "order: make what it decides by the same on every rank"
)
LEFT = "has left the cell"
COMPUTES = "computes"


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


def html(view: WaitingView) -> str:
    """Return the table as HTML, for a place inside a panel."""
    head = "".join(
        head_cell(name, style=FIRST if name == "rank" else "", right=name == "since")
        for name in _HEAD
    )
    rows = [
        row(
            "".join(
                cell(
                    escape(value),
                    style=(FIRST if n == 0 else "") + ("text-align:right" if n == 3 else ""),
                )
                for n, value in enumerate(values)
            )
        )
        for values in _rows(view)
    ]
    return f'<div style="margin-top:6px">{html_table(head, rows)}</div>{notes_html(_hints(view))}'


def summary(view: WaitingView) -> str:
    """Return who waits for whom, in a few words for the line of a log."""
    waits = [
        f"rank {ranks_text(ranks)} waits for rank {ranks_text(where.missing)}"
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
        return (
            f"the ranks diverged: {', '.join(deeds[each] for each in sorted(deeds))}; {_SAME_ORDER}"
        )
    return ""


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
        return f"{told}: they wait for each other, and none can go on; {_SAME_ORDER}"
    return (
        f"{told}, and rank {ranks_text(left)} has left the cell and will never come; what needs "
        "every rank, such as a sharded model's forward, must run on every rank: take it out of "
        "the `if`"
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
        return label, "", LEFT, ""
    line = shortened(where.source, _LINE)
    if where.line is not None:
        line = f"{where.line}: {line}".removesuffix(": ")
    if where.inner:
        line += f" ({shortened(where.inner, 40)})"
    deed = one_line(where.doing) or COMPUTES
    if where.missing:
        deed += f", waits for rank {ranks_text(where.missing)}"
    return label, line, shortened(deed, _DEED), seconds_text(seconds) if seconds else ""
