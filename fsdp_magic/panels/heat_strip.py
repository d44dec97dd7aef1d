"""Many ranks at a glance: a cell for each, stronger where there is more; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.panels.parts import BLOCKS, RULE, SMALL, escape, hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """One cell.

    Attributes:
        share: how full it is, 0 to 1; None: not known.
        words: text: what it says.
        edge: colour of a frame that marks it; empty: none.
    """

    share: float | None
    words: str
    edge: str = ""


def html(cells: Sequence[Heat], *, heading: str, low: str, high: str) -> str:
    """Draw a strip.

    Args:
        cells: one per rank, in order.
        heading: text: what is shown.
        low: text: what the faintest cell means.
        high: text: what the strongest cell means.
    """
    # A few ranks fill the strip too; where many wrap, the last line is not wider than the others.
    widest = max(14, 896 // max(1, len(cells)) - 2)
    boxes = "".join(
        f'<span title="{escape(cell.words)}" style="flex:1 0 9px;max-width:{widest}px;height:16px;'
        f'border-radius:2px;{_fill(cell.share)}{_edge(cell.edge)}">'
        f"{hidden(cell.words + ';')}</span>"
        for cell in cells
    )
    scale = "".join(
        f'<span style="display:inline-block;width:12px;height:9px;{_fill(step / 4)}"></span>'
        for step in range(5)
    )
    return (
        f'<div style="display:flex;justify-content:space-between;margin-top:6px;{SMALL}">'
        f"<span>{escape(heading)} </span>"
        f'<span style="white-space:nowrap">{escape(low)} {scale} {escape(high)}</span></div>'
        f'<div role="img" aria-label="{escape(heading)}" style="display:flex;flex-wrap:wrap;'
        f'gap:2px">{boxes}</div>'
    )


def text(cells: Sequence[Heat], *, heading: str) -> list[str]:
    """Return the strip as blocks, 64 ranks a line."""
    blocks = "".join(
        "?" if cell.share is None else BLOCKS[round(7 * min(1.0, max(0.0, cell.share)))]
        for cell in cells
    )
    return [heading, *(blocks[start : start + 64] for start in range(0, len(blocks), 64))]


def _fill(share: float | None) -> str:
    if share is None:
        return f"box-sizing:border-box;border:{RULE}"
    # Squared: what matters is who is close to full, and there the eye needs the difference.
    return f"background:rgba(58,120,201,{0.07 + 0.93 * min(1.0, max(0.0, share)) ** 2:.2f})"


def _edge(colour: str) -> str:
    return f";box-shadow:inset 0px 0px 0px 2px {colour}" if colour else ""
