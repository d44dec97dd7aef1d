"""The picture of memory over two steps as SVG: stacked areas, the limit, the peak; pure.

Every kind is one band of the stack, drawn from the highest to the lowest; each goes a little below
its lower edge, where the next one covers it, so that no gap shines through. Words stand beside
the picture in HTML, in the colour of the page: an image has none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.core.planning.timeline import KINDS, Point, Timeline
from fsdp_magic.panels.memory_kinds import MEMORY_KINDS, TINT, MemoryKind, drawn
from fsdp_magic.panels.parts import GREY, RED

WIDTH, HEIGHT = 600, 220
_FINE = 4
"""Steps of a unit in which coordinates are written, as whole numbers."""
_COLUMNS = 180
"""Of about three pixels each: more would make the picture heavy, and hardly finer."""


def svg(timeline: Timeline, *, top_bytes: float, limit_bytes: float | None) -> str:
    """Return the picture.

    Args:
        timeline: what is drawn.
        top_bytes: what its height means.
        limit_bytes: where the limit is drawn; None: it is beyond the top.
    """
    columns = _columns(timeline.points)
    scale = HEIGHT * _FINE / top_bytes
    xs = [round(WIDTH * _FINE * left_of(p.entry, timeline) / 100) for p in columns]
    areas = "".join(
        f'<path fill="{_fill(kind)}" d="{_band(xs, edges, scale)}"/>'
        for kind, edges in reversed(_bands(columns, top_bytes / (4 * HEIGHT)))
    )
    patterns = "".join(_pattern(kind) for kind in MEMORY_KINDS if kind.is_hatched)
    width, height = WIDTH * _FINE, HEIGHT * _FINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'preserveAspectRatio="none"><defs>{patterns}</defs>{_grid()}{areas}'
        f"{_limit(limit_bytes, scale)}{_peak(timeline)}</svg>"
    )


def left_of(entry: int, timeline: Timeline) -> float:
    """Return where an entry is, as a percentage of the width."""
    return 100 * entry / max(1, timeline.entries - 1)


def _columns(points: Sequence[Point]) -> list[Point]:
    """Return the points that are drawn: of each stretch the one at which most is held."""
    stretch = max(1, -(-len(points) // _COLUMNS))
    return [
        max(points[start : start + stretch], key=lambda point: point.total)
        for start in range(0, len(points), stretch)
    ]


def _bands(
    columns: Sequence[Point], least: float
) -> list[tuple[MemoryKind, list[tuple[float, float]]]]:
    """Return the kinds of which more is held, with lower and upper edge of each in every column."""
    sizes = [drawn(dict(zip(KINDS, point.held, strict=True))) for point in columns]
    ground = [0.0] * len(columns)
    bands = []
    for number, kind in enumerate(MEMORY_KINDS):
        tops = [below + size[number] for below, size in zip(ground, sizes, strict=True)]
        if max(size[number] for size in sizes) > least:
            bands.append((kind, list(zip(ground, tops, strict=True))))
        ground = tops
    return bands


def _band(xs: Sequence[int], edges: Sequence[tuple[float, float]], scale: float) -> str:
    """Return path data along the upper edge and back along the lower one."""
    ground = HEIGHT * _FINE
    upper = [(x, ground - round(top * scale)) for x, (_, top) in zip(xs, edges, strict=True)]
    lower = [
        (x, min(ground, ground - round(bottom * scale) + _FINE))
        for x, (bottom, _) in zip(xs, edges, strict=True)
    ]
    corners = [*_corners(upper), *_corners(lower)[::-1]]
    x, y = corners[0]
    data = [f"M{x} {y}"]
    for next_x, next_y in corners[1:]:
        data.append(f"l{next_x - x} {next_y - y}")
        x, y = next_x, next_y
    return f"{''.join(data)}z".replace(" -", "-")


def _corners(line: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the points of a line without those in the midst of a level stretch."""
    return [
        spot
        for number, spot in enumerate(line)
        if not 0 < number < len(line) - 1
        or not line[number - 1][1] == spot[1] == line[number + 1][1]
    ]


def _fill(kind: MemoryKind) -> str:
    return f"url(#{kind.letter})" if kind.is_hatched else kind.colour


def _pattern(kind: MemoryKind) -> str:
    """Return the hatch of a kind, as its boxes have it."""
    size = 5 * _FINE
    return (
        f'<pattern id="{kind.letter}" width="{size}" height="{size}" '
        f'patternUnits="userSpaceOnUse"><path d="M0 0h{size}v{size}h-{size}z" fill="{kind.colour}" '
        f'fill-opacity="{TINT}"/><path d="M0 {size}L{size} 0" stroke="{kind.colour}" '
        f'stroke-width="{_FINE * 2}" stroke-linecap="square"/></pattern>'
    )


def _grid() -> str:
    lines = "".join(f"M0 {HEIGHT * _FINE * n // 4}h{WIDTH * _FINE}" for n in range(5))
    return f'<path d="{lines}" stroke="{GREY}" stroke-opacity=".3" {_THIN}/>'


def _limit(limit_bytes: float | None, scale: float) -> str:
    if limit_bytes is None:
        return ""
    y = HEIGHT * _FINE - round(limit_bytes * scale)
    return (
        f'<path d="M0 0h{WIDTH * _FINE}V{y}H0z" fill="{RED}" fill-opacity=".1"/>'
        f'<path d="M0 {y}h{WIDTH * _FINE}" stroke="{RED}" stroke-width="1.5" {_THIN}/>'
    )


def _peak(timeline: Timeline) -> str:
    entry = timeline.points[timeline.peak].entry
    x = round(WIDTH * _FINE * left_of(entry, timeline) / 100)
    return (
        f'<path d="M{x} 0v{HEIGHT * _FINE}" stroke="{GREY}" stroke-width="1.5" '
        f'stroke-dasharray="4 3" {_THIN}/>'
    )


_THIN = 'fill="none" vector-effect="non-scaling-stroke"'
