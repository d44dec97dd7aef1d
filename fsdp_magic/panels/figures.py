"""Figures: numbers with their names, in columns that are as wide in every row of a panel; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.panels.parts import NUMBERS, RED, SMALL, escape, figure_text, icon, shortened

_CUT = "overflow:hidden;text-overflow:ellipsis"
_TILE = "min-width:0;white-space:nowrap;height:34px;line-height:19px"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its name.

    Attributes:
        name: text.
        value: text.
        bad: whether it is marked, because no number should be like that.
    """

    name: str
    value: str
    bad: bool = False


def loss_figure(name: str, value: float | None) -> Figure:
    """Return a loss or a metric, marked where it is not finite."""
    bad = value is not None and not math.isfinite(value)
    return Figure(name=shortened(name, 40), value=figure_text(value), bad=bad)


def figures_html(figures: Sequence[Figure]) -> str:
    """Return figures in columns that are as wide in every row of a panel."""
    tiles = "".join(
        f'<div style="{_TILE}"><div style="{SMALL};line-height:15px;{_CUT}" '
        f'title="{escape(figure.name)}">{escape(figure.name)} </div>'
        f'<b style="{NUMBERS}">{icon("✕", RED) + " " if figure.bad else ""}'
        f"{escape(figure.value)} </b></div>"
        for figure in figures
    )
    # Seven columns from 700 px on, three on a narrow page.
    return (
        '<div style="display:grid;grid-template-columns:repeat(auto-fill,minmax(92px,1fr));'
        f'gap:2px 8px;margin-top:2px">{tiles}</div>'
    )


def figures_text(figures: Sequence[Figure]) -> str:
    """Return figures on one line: ``loss 2.510  gradient norm 0.532``."""
    return "  ".join(f"{figure.name} {figure.value}" for figure in figures)
