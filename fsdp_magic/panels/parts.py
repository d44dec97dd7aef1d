"""What all panels are made of: colours, escaping, cells, number formats; pure.

The pieces live on inline styles alone. A notebook that is not trusted loses ``<style>``,
``<script>``, ``<svg>`` and every aria attribute, so nothing here depends on them: text takes
the page's colour, a bar is a box with its value hidden beside it (read where styles are
stripped), and grey is translucent, so that one panel serves a white and a dark page.
"""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_magic.core.units import GIB, MIB, UNKNOWN

BLUE, GREEN, ORANGE, RED, GREY = "#3A78C9", "#129A76", "#C4700B", "#D1342F", "#808080"
"""Colours of lines, states and warnings: 3:1 or more on white and on #111."""

TRACK = "rgba(128,128,128,.2)"
RULE = "1px solid rgba(128,128,128,.35)"
SMALL = "font-size:12px;opacity:.7"
NUMBERS = "font-variant-numeric:tabular-nums"

_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.?)")
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, marks that turn the direction of text, and halves of characters."""
_LONGEST_NOTE = 600


def plain(text: object) -> str:
    """Return text that cannot steer a terminal: no escape sequences, no control characters.

    Line ends and tabs stay.
    """
    lines = str(text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE_SEQUENCE.sub("", lines))


def one_line(text: object) -> str:
    """Return text without escape sequences and line ends."""
    return " ".join(plain(text).split())


def shortened(text: object, limit: int = 100) -> str:
    """Return text on one line, its middle left out if it is too long."""
    line = one_line(text)
    if len(line) <= limit:
        return line
    return f"{line[: limit // 2]}…{line[-(limit // 2) :]}"


def escape(text: object) -> str:
    """Return text that means itself in HTML, also inside a quoted attribute."""
    return html.escape(plain(text), quote=True)


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUnit:
    """The unit of every size in one panel, so that its columns align.

    Attributes:
        name: ``GiB`` or ``MiB``.
        size: bytes in it.
        decimals: digits behind the point.
    """

    name: str
    size: int
    decimals: int

    def text(self, count: float | None) -> str:
        """Return a number of bytes in this unit, without its name."""
        return UNKNOWN if count is None else f"{count / self.size:,.{self.decimals}f}"


def memory_unit(counts: Iterable[int | None]) -> MemoryUnit:
    """Choose the unit in which the largest of some sizes reads well."""
    largest = max((count for count in counts if count is not None), default=GIB)
    if largest >= GIB:
        return MemoryUnit(name="GiB", size=GIB, decimals=1 if largest >= 10 * GIB else 2)
    return MemoryUnit(name="MiB", size=MIB, decimals=0 if largest >= 100 * MIB else 1)


def figure_text(value: float | None) -> str:
    """Return a loss or a norm in about four figures: ``2.630``, ``1.20e+06``, ``nan``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-3 <= size < 1e5:
        return f"{value:.2e}"
    return f"{value:.{min(4, max(0, 3 - math.floor(math.log10(size)))) if size else 3}f}"


def percent_text(value: float | None) -> str:
    """Return a whole percentage."""
    return UNKNOWN if value is None else f"{value:.0f} %"


# ---------------------------------------------------------------- HTML


def card(content: str, *, label: str) -> str:
    """Frame a panel; what is wider than the page scrolls inside it.

    Args:
        content: HTML.
        label: text that names the panel to a screen reader.
    """
    return (
        f'<div role="group" aria-label="{escape(label)}" style="font-size:13px;line-height:1.45;'
        f"max-width:920px;padding:10px 12px;border:{RULE};border-radius:6px;"
        f'box-sizing:border-box;overflow-x:auto;text-align:left">{content}</div>'
    )


def headline(title: str, *, summary: str = "", stamp: str = "", aside: str = "") -> str:
    """Return the first line of a panel.

    Args:
        title: text.
        summary: text beside it.
        stamp: text at the end of the line: the time.
        aside: HTML in its place, such as a key.
    """
    beside = f' <span style="{SMALL}">{escape(summary)} </span>' if summary else ""
    end = f'<span style="flex:none;{SMALL};{NUMBERS}">{escape(shortened(stamp, 20))} </span>'
    return (
        f'<div style="display:flex;flex-wrap:{"wrap" if aside else "nowrap"};'
        'justify-content:space-between;align-items:baseline;gap:0px 16px;margin-bottom:4px">'
        f'<span style="min-width:0;overflow-wrap:break-word"><b>{escape(title)} </b>{beside}</span>'
        f"{aside or end}</div>"
    )


def muted(content: str) -> str:
    """Return HTML as secondary text."""
    return f'<span style="opacity:.7">{content}</span>'


def hidden(text: str) -> str:
    """Return text that is seen only where styles are stripped, and read aloud."""
    return f'<span style="font-size:0px;line-height:0px">{escape(text)} </span>'


def icon(glyph: str, colour: str) -> str:
    """Return a coloured sign; the word beside it says the same."""
    return f'<span style="color:{colour}">{glyph}</span>'


def image(svg: str, *, alt: str, style: str) -> str:
    """Return a drawing as an image, which survives where ``<svg>`` is removed."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" style="{style}" src="data:image/svg+xml;base64,{data}">'


def table(head: str, rows: Iterable[str], *, fixed: bool = False) -> str:
    """Return a table across the panel.

    Args:
        head: cells of its heading row.
        rows: its rows, as ``row`` makes them.
        fixed: whether columns take the widths of the heading and never move.
    """
    layout = "fixed" if fixed else "auto"
    return (
        f'<table style="border:0;border-collapse:collapse;width:100%;margin:0;font-size:12px;'
        f'table-layout:{layout};{NUMBERS}">'
        f'<thead style="border-bottom:{RULE};background:transparent">{row(head)}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def row(cells: str, *, style: str = "") -> str:
    """Return a table row without a notebook's stripes."""
    return f'<tr style="background:transparent;{style}">{cells}</tr>'


def cell(content: str, *, style: str = "", title: str = "") -> str:
    """Return a left-aligned table cell."""
    tip = f' title="{title}"' if title else ""
    return f'<td{tip} style="{_CELL}text-align:left;{style}">{content}</td>'


def number_cell(content: str, *, style: str = "") -> str:
    """Return a right-aligned table cell."""
    return f'<td style="{_CELL}text-align:right;{style}">{content}</td>'


def head_cell(content: str, *, style: str = "", right: bool = False) -> str:
    """Return a heading cell."""
    side = "right" if right else "left"
    return (
        f'<th scope="col" style="{_CELL}padding-bottom:3px;text-align:{side};font-weight:400;'
        f'opacity:.7;{style}">{content}</th>'
    )


# Notebooks set a line height of their own in tables, which would follow the font of every sign.
_CELL = "border:0;padding:1px 0 1px 10px;white-space:nowrap;line-height:16px;"
FIRST = "padding-left:0;"
"""Style of a cell in the first column."""


def notes_html(notes: Sequence[str]) -> str:
    """Return sentences under a panel, one a line."""
    lines = "".join(f"<div>{escape(shortened(note, _LONGEST_NOTE))}</div>" for note in notes)
    style = f"margin-top:6px;overflow-wrap:break-word;{SMALL}"
    return f'<div style="{style}">{lines}</div>' if lines else ""


# ---------------------------------------------------------------- text


def text_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return lines with aligned columns: the first ``left`` to the left, the rest to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            value.ljust(width) if index < left else value.rjust(width)
            for index, (value, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in rows
    ]


def notes_text(notes: Sequence[str]) -> list[str]:
    """Return the sentences under a panel as lines."""
    return [shortened(note, _LONGEST_NOTE) for note in notes]


BLOCKS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float | None]) -> str:
    """Return numbers as a line of blocks; unknown and non-finite ones as a space."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    # Halves: the distance between two huge numbers is not finite.
    span = high / 2 - low / 2 or 1.0
    return "".join(
        BLOCKS[int(7 * ((value / 2 - low / 2) / span))]
        if value is not None and math.isfinite(value)
        else " "
        for value in values
    )
