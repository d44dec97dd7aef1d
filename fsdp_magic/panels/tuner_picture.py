"""The picture of a search for a batch size as SVG: memory above, speed beneath; pure.

Lines and areas are stretched to the width of the page, signs are not: those stand at a percentage
of it, so that a dot stays round. Words are HTML over it, in the colour of the page: an image has
none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.panels.label_places import Point
from fsdp_magic.panels.parts import BLUE, GREEN, GREY, ORANGE, RED, escape
from fsdp_magic.panels.tuner_scale import MEMORY_HEIGHT, MemoryAxis, SizeAxis, curve, expected_bytes
from fsdp_magic.panels.tuner_view import ProbeView, TunerView

STRIP_TOP, STRIP_HEIGHT = MEMORY_HEIGHT + 20, 50
HEIGHT = STRIP_TOP + STRIP_HEIGHT
_WIDTH = 1000
_BAR = 6


def svg(view: TunerView, sizes: SizeAxis, memory: MemoryAxis, *, label: str) -> str:
    """Return the picture.

    Args:
        view: the search.
        sizes: the axis across.
        memory: the axis upwards.
        label: the picture in words.
    """
    line = _line(curve(view, sizes, memory))
    stretched = _limits(view, memory) + _grid(memory) + line + _drop(view, sizes, memory)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{HEIGHT}" role="img">'
        f'<title>{escape(label)}</title><svg viewBox="0 0 {_WIDTH} {HEIGHT}" width="100%" '
        f'height="{HEIGHT}" preserveAspectRatio="none">{stretched}</svg>'
        f"{_bars(view, sizes)}{_signs(view, sizes, memory)}</svg>"
    )


def mark(probe: ProbeView, sizes: SizeAxis, memory: MemoryAxis) -> Point:
    """Return where a probe is: at its peak, or above the capacity if nobody knows that."""
    peak = probe.peak_bytes
    if peak is None:
        return Point(sizes.left(probe.micro_batch_size), _beyond(memory))
    return Point(sizes.left(probe.micro_batch_size), max(6.0, memory.top(peak)))


def trying_mark(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> Point | None:
    """Return where the probe under way is: at what is expected of it."""
    if view.trying is None:
        return None
    expected = expected_bytes(view, view.trying)
    height = memory.top_bytes / 2 if expected is None else expected
    return Point(sizes.left(view.trying), max(6.0, memory.top(height)))


def fastest(view: TunerView) -> float:
    """Return the highest speed of a probe in samples per second; 0: none is known."""
    return max((probe.samples_per_second or 0.0 for probe in view.probes), default=0.0)


def _beyond(memory: MemoryAxis) -> float:
    return memory.top(memory.capacity_bytes) / 2 if memory.capacity_bytes else 6.0


def _limits(view: TunerView, memory: MemoryAxis) -> str:
    """Return what is out of memory, the margin beneath it, and the line between them."""
    if memory.capacity_bytes is None:
        return ""
    y = memory.top(memory.capacity_bytes)
    low = memory.top(memory.capacity_bytes * (1 - view.margin))
    return (
        f'<path d="M0 0H{_WIDTH}V{y:.1f}H0z" fill="{RED}" fill-opacity=".1"/>'
        f'<path d="M0 {y:.1f}H{_WIDTH}V{low:.1f}H0z" fill="{ORANGE}" fill-opacity=".22"/>'
        f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="{RED}" stroke-width="1.5" {_THIN}/>'
    )


def _grid(memory: MemoryAxis) -> str:
    heights = [memory.top(count) for count, _ in memory.ticks()]
    lines = "".join(f"M0 {y:.1f}H{_WIDTH}" for y in heights)
    ground = f"M0 {HEIGHT}H{_WIDTH}M0 {STRIP_TOP}H{_WIDTH}"
    return f'<path d="{lines}{ground}" stroke="{GREY}" stroke-opacity=".3" {_THIN}/>'


def _line(points: Sequence[Point]) -> str:
    """Return the line of expected memory."""
    if len(points) < 2:
        return ""
    corners = "L".join(f"{_WIDTH * left / 100:.1f} {top:.1f}" for left, top in points)
    return (
        f'<path d="M{corners}" stroke="{BLUE}" stroke-width="1.5" stroke-dasharray="5 4" {_THIN}/>'
    )


def _drop(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> str:
    """Return the line from the pick down to its size."""
    if not view.pick:
        return ""
    places = [mark(p, sizes, memory) for p in view.probes if p.micro_batch_size == view.pick]
    start = places[-1].top + 8 if places else 0
    line = f"M{_WIDTH * sizes.left(view.pick) / 100:.1f} {start:.1f}V{HEIGHT}"
    return f'<path d="{line}" stroke="{GREEN}" stroke-opacity=".6" {_THIN}/>'


def _signs(view: TunerView, sizes: SizeAxis, memory: MemoryAxis) -> str:
    """Return a dot for what fits, a cross for what does not, rings for the pick and for now."""
    signs = []
    for probe in view.probes:
        place = mark(probe, sizes, memory)
        if probe.micro_batch_size == view.pick and probe.fits:
            signs.append(_circle(place, 7.5, f'fill="none" stroke="{GREEN}" stroke-width="2.5"'))
        signs.append(_circle(place, 4, f'fill="{BLUE}"') if probe.fits else _cross(place))
    now = trying_mark(view, sizes, memory)
    if now is not None:
        signs.append(_circle(now, 5, f'fill="none" stroke="{BLUE}" stroke-width="2"'))
    return "".join(signs)


def _circle(place: Point, radius: float, look: str) -> str:
    return f'<circle cx="{place.left:.2f}%" cy="{place.top:.1f}" r="{radius}" {look}/>'


def _cross(place: Point) -> str:
    return (
        f'<svg x="{place.left:.2f}%" y="{place.top:.1f}" overflow="visible">'
        f'<path d="M-4 -4l8 8m0 -8l-8 8" stroke="{RED}" stroke-width="2.5" fill="none"/></svg>'
    )


def _bars(view: TunerView, sizes: SizeAxis) -> str:
    """Return a bar for the speed of each probe, faint beside that of the pick."""
    most = fastest(view)
    if not most:
        return ""
    bars = []
    for probe in view.probes:
        height = STRIP_HEIGHT * (probe.samples_per_second or 0.0) / most
        is_pick = probe.micro_batch_size == view.pick
        look = f'fill="{GREEN if is_pick else BLUE}" fill-opacity="{1 if is_pick else 0.6}"'
        bars.append(
            f'<svg x="{sizes.left(probe.micro_batch_size):.2f}%" y="{HEIGHT - height:.1f}" '
            f'overflow="visible"><rect x="{-_BAR / 2:g}" width="{_BAR}" height="{height:.1f}" '
            f"{look}/></svg>"
        )
    return "".join(bars)


_THIN = 'fill="none" vector-effect="non-scaling-stroke"'
