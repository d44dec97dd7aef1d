"""Columns, cells and bars of the placement mosaic; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_magic.core.placement import Placement
from fsdp_magic.core.units import bytes_text, ranks_named, ranks_text
from fsdp_magic.panels.module_rows import Held, rank_groups
from fsdp_magic.panels.parts import BLUE, FIRST, head_cell, muted, row, table

MANY_RANKS = 9
"""From here on equal ranks share a column: more columns do not fit a page."""

_MOST_COLUMNS = 8
SHARDED = f"background:{BLUE}"
REPLICATED = (
    "box-sizing:border-box;border:1px solid #BF8613;background:repeating-linear-gradient("
    "45deg,#BF8613 0px,#BF8613 2px,transparent 2px,transparent 4px)"
)

Tip = Callable[[int], str]
"""From a rank to the escaped tooltip of its cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A rank, or consecutive ranks that hold the same.

    Attributes:
        ranks: which.
        is_all: whether every rank of several is among them.
    """

    ranks: range
    is_all: bool = False

    @property
    def rank(self) -> int:
        """The rank that is shown for all of them."""
        return self.ranks[0]

    @property
    def heading(self) -> str:
        """``rank 3``, ``ranks 0-62``, ``each rank``."""
        return "each rank" if self.is_all else ranks_named(tuple(self.ranks))


def columns_of(placement: Placement) -> list[Column]:
    """Return a column per rank; one for all, or for a run of equal ranks where there are many.

    One is for all where every parameter is whole on every rank.
    """
    world = placement.world_size
    whole = all(parameter.kind == "replicated" for parameter in placement.parameters)
    if world > 1 and whole and placement.parameters:
        return [Column(ranks=range(world), is_all=True)]
    if world < MANY_RANKS:
        return [Column(ranks=range(rank, rank + 1)) for rank in range(world)]
    groups = rank_groups(placement.parameters, world)
    if len(groups) > _MOST_COLUMNS:
        groups = [*groups[: _MOST_COLUMNS - 1], groups[-1]]
    return [Column(ranks=group) for group in groups]


def left_out_text(columns: Sequence[Column], world_size: int) -> str:
    """Return a sentence on the ranks that no column stands for; empty if there are none."""
    shown = {rank for column in columns for rank in column.ranks}
    missing = tuple(rank for rank in range(world_size) if rank not in shown)
    return f"ranks {ranks_text(missing)} differ and are not shown" if missing else ""


def mosaic_table(columns: Sequence[Column], lines: Sequence[str], *, what: str) -> str:
    """Return lines under a heading row; where the page is narrow they scroll, not shrink.

    Args:
        columns: the columns.
        lines: as ``line`` makes them.
        what: heading of the names.
    """
    # Of eight ranks names get 29 %, ranks 60 %: a name and a rank's sum have to fit.
    least = max(560, 97 * len(columns)) if len(columns) > 1 else 340
    drawn = table(_head(columns, what), lines, fixed=True)
    return f'<div style="min-width:{least}px">{drawn}</div>'


def _head(columns: Sequence[Column], what: str) -> str:
    names = 29 if len(columns) > 4 else 40
    width = f"width:{(89 - names) / len(columns):.2f}%;padding-left:0"
    return (
        head_cell(what, style=FIRST + f"width:{names}%")
        + "".join(head_cell(column.heading, style=width) for column in columns)
        + head_cell("all ranks", style="width:11%", right=True)
    )


def line(name: str, cells: str, total: str, *, style: str = "") -> str:
    """Return a row: a name, the cells of the ranks, a sum."""
    return row(
        '<td style="border:0;padding:2px 8px 2px 0;text-align:left;white-space:nowrap;'
        f'overflow:hidden;text-overflow:ellipsis">{name}</td>{cells}'
        f'<td style="border:0;padding:2px 0;text-align:right;white-space:nowrap">{total}</td>',
        style=style,
    )


def bar_cells(held: Sequence[Held], columns: Sequence[Column], *, longest: int, tip: Tip) -> str:
    """Return a bar for each column, as long as the bytes that one rank of it holds.

    Args:
        held: on each rank.
        columns: the columns.
        longest: bytes of a bar that fills its cell.
        tip: the tooltip of each rank's cell.
    """
    return "".join(
        f'<td title="{tip(column.rank)}" style="padding:2px 4px 2px 0;text-align:left">'
        f"{_bar(held[column.rank], longest)}</td>"
        for column in columns
    )


def text_bar(held: Held, longest: int, width: int = 8) -> str:
    """Return a bar as blocks."""
    sharded, replicated = held
    if not sharded + replicated:
        return "–"
    cells = max(1, min(width, round(width * (sharded + replicated) / longest)))
    whole = round(cells * replicated / (sharded + replicated))
    return "▇" * (cells - whole) + "▒" * whole


def _bar(held: Held, longest: int) -> str:
    """Return the boxes of one cell: what is sharded, then what is replicated.

    Their sizes are in them as text of no height, to be read where styles are stripped.
    """
    boxes = [
        f'<div style="height:9px;width:{_width(size / longest)};{style};'
        f'font-size:0px">{bytes_text(size)}</div>'
        for size, style in zip(held, (SHARDED, REPLICATED), strict=True)
        if size
    ]
    if len(boxes) < 2:
        return "".join(boxes) or muted("–")
    return f'<div style="display:flex">{"".join(boxes)}</div>'


def _width(share: float) -> str:
    """Return a bar's width; what is held is seen, however little."""
    return f"{min(100.0, 100 * share):.0f}%" if share > 0.03 else "2px"
