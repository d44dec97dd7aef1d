"""The loss of a run as a line over its steps; pure.

The chart keeps one height from the first frame to the last. While a run is under way it is
inline SVG, which a browser redraws cheaply; in the frame that stays in the file it is an image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.panels.parts import (
    BLUE,
    GREY,
    RED,
    RULE,
    SMALL,
    escape,
    figure_text,
    icon,
    image,
    muted,
    spark,
)

HEIGHT = 84
_WIDTH = 600
_POINTS = 120
_AXIS = 52
_HUGE = 1e100
"""Losses beyond it are drawn at the edge: differences of larger ones are not finite."""

Point = tuple[float, float | None]
"""A step (by index) and its loss; None where the loss is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHistory:
    """Losses of a run, one per finished step.

    Attributes:
        losses: may hold nan and infinities.
        first_step: steps done before this run.
        total_steps: steps this run will take; None: not known.
    """

    losses: Sequence[float]
    first_step: int
    total_steps: int | None

    @property
    def finite(self) -> list[float]:
        """The losses that are numbers."""
        return [loss for loss in self.losses if math.isfinite(loss)]

    @property
    def first_non_finite(self) -> int | None:
        """The first step whose loss is not finite, counted as the panel's step n/N counts."""
        for index, loss in enumerate(self.losses):
            if not math.isfinite(loss):
                return self.first_step + index + 1
        return None


def html(history: LossHistory, *, as_image: bool) -> str:
    """Draw the chart, or keep its place while there is nothing to draw.

    Args:
        history: the losses.
        as_image: whether it has to survive in a file.
    """
    finite = history.finite
    if not finite:
        low, high, picture = "", "", _waiting(history)
    else:
        bottom, top = _limits(finite)
        low, high = figure_text(bottom), figure_text(top) + ("+" if max(finite) > top else "")
        picture = _picture(history, bottom=bottom, top=top, as_image=as_image)
    side = f"flex:none;width:{_AXIS - 6}px;padding-right:6px;text-align:right;{SMALL}"
    return (
        f'<div style="display:flex;margin-top:8px"><div style="{side};height:{HEIGHT}px;'
        "display:flex;flex-direction:column;justify-content:space-between;line-height:12px;"
        'font-size:11px">'
        f"<span>{high} </span><span>loss </span><span>{low} </span></div>"
        f'<div style="flex:1 1 0%;min-width:0;height:{HEIGHT}px">{picture}</div></div>'
        f"{_steps_axis(history)}"
    )


def text(history: LossHistory) -> str:
    """Return the curve as one line of blocks."""
    finite = history.finite
    line = spark([value for _, value in _thinned(history.losses, 40)]).ljust(40)
    bottom, top = (min(finite), max(finite)) if finite else (None, None)
    note = _non_finite_text(history)
    ends = f"{figure_text(top)} to {figure_text(bottom)}" if finite else "n/a"
    return f"loss {line} {ends}{'; ' + note if note else ''}"


def _waiting(history: LossHistory) -> str:
    words = "no finite loss yet" if history.losses else "waiting for the first step"
    return (
        f'<div style="box-sizing:border-box;margin:2px 0;border-top:{RULE};border-bottom:{RULE};'
        f'height:{HEIGHT - 4}px;line-height:{HEIGHT - 6}px;text-align:center">{muted(words)}</div>'
    )


def _steps_axis(history: LossHistory) -> str:
    """Return the line under the chart: first and last step, and a loss that broke."""
    last = history.first_step + (history.total_steps or len(history.losses))
    broken = _non_finite_text(history)
    middle = f"{icon('✕', RED)} {escape(broken)}" if broken else muted("step")
    return (
        '<div style="font-size:11px;height:16px;line-height:16px;overflow:hidden;display:flex;'
        f'justify-content:space-between;padding-left:{_AXIS}px;white-space:nowrap">'
        f"{muted(f'{history.first_step:,} ')}<span>{middle} </span>{muted(f'{last:,}')}</div>"
    )


def _non_finite_text(history: LossHistory) -> str:
    step = history.first_non_finite
    return "" if step is None else f"loss first not finite at step {step:,}"


def _limits(finite: Sequence[float]) -> tuple[float, float]:
    """Return bottom and top of the axis; a few wild values do not flatten the rest."""
    ordered = sorted(max(-_HUGE, min(_HUGE, loss)) for loss in finite)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    if high > usual + 4 * (usual - low) > low:
        high = usual + (usual - low)
    if high - low > 1e-9 * max(abs(high), abs(low)):
        return low, high
    margin = abs(low) / 2 or 0.5
    return low - margin, high + margin


def _thinned(losses: Sequence[float], count: int) -> list[Point]:
    """Return at most ``count`` means over equal stretches; a stretch that broke has none."""
    count = min(count, len(losses))
    points: list[Point] = []
    for number in range(count):
        start, end = number * len(losses) // count, (number + 1) * len(losses) // count
        part = losses[start:end]
        mean = sum(part) / len(part) if all(map(math.isfinite, part)) else None
        points.append(((start + end - 1) / 2, mean))
    return points


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return an exponential mean without the bias of its start; it skips what is not finite."""
    keep = 1 - 2 / (1 + max(3.0, 0.04 * len(losses)))
    total = weight = 0.0
    means = []
    for loss in losses:
        if math.isfinite(loss):
            total, weight = keep * total + (1 - keep) * loss, keep * weight + 1 - keep
            means.append(total / weight)
        else:
            means.append(math.nan)
    return means


def _path(points: Sequence[Point], *, steps: int, bottom: float, top: float) -> str:
    """Return SVG path data; an unknown point leaves a gap, a lonely one becomes a dot."""
    data, joined = [], False
    for index, value in points:
        if value is None:
            joined = False
            continue
        x = _WIDTH * (index + 1) / steps
        share = (min(max(value, bottom), top) - bottom) / (top - bottom)
        place = f"{x:.1f} {3 + (HEIGHT - 6) * (1 - share):.1f}"
        data.append(f"L{place}" if joined else f"M{place}h0")
        joined = True
    return "".join(data)


def _picture(history: LossHistory, *, bottom: float, top: float, as_image: bool) -> str:
    """Return the drawing with its description."""
    losses, steps = history.losses, max(history.total_steps or 0, len(history.losses), 1)
    finite = history.finite
    label = (
        f"Loss over {len(losses)} steps: first {figure_text(losses[0])}, "
        f"lowest {figure_text(min(finite))}, highest {figure_text(max(finite))}, "
        f"last {figure_text(losses[-1])}"
    )
    if broken := _non_finite_text(history):
        label += f"; {broken}"
    shape = ' fill="none" vector-effect="non-scaling-stroke" stroke-linecap="round"'
    raw = _path(_thinned(losses, _POINTS), steps=steps, bottom=bottom, top=top)
    smooth = _path(_thinned(_smoothed(losses), _POINTS), steps=steps, bottom=bottom, top=top)
    lines = "".join(
        f'<path d="M0 {y}H{_WIDTH}" stroke="{GREY}" stroke-opacity=".3"{shape}/>'
        for y in (3, HEIGHT // 2, HEIGHT - 3)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {HEIGHT}" role="img" '
        f'preserveAspectRatio="none" style="display:block;width:100%;height:{HEIGHT}px" '
        f'aria-label="{escape(label)}"><title>{escape(label)}</title>{lines}'
        f"{_broken_mark(history, steps, shape)}"
        f'<path d="{raw}" stroke="{BLUE}" stroke-opacity=".45"{shape}/>'
        f'<path d="{smooth}" stroke="{BLUE}" stroke-width="2"{shape}/></svg>'
    )
    if not as_image:
        return svg
    return image(svg, alt=label, style=f"display:block;width:100%;height:{HEIGHT}px;margin:0")


def _broken_mark(history: LossHistory, steps: int, shape: str) -> str:
    """Return a dashed line where the loss first was not finite."""
    step = history.first_non_finite
    if step is None:
        return ""
    x = _WIDTH * (step - history.first_step) / steps
    return f'<path d="M{x:.1f} 0V{HEIGHT}" stroke="{RED}" stroke-dasharray="3 3"{shape}/>'
