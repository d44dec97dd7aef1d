"""The loss of a run as a line over its steps; pure.

The chart keeps one height from the first frame to the last. While a run is under way it is
inline SVG, which a browser redraws cheaply; in the frame that stays in the file it is an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.core.units import UNKNOWN
from fsdp_magic.panels.loss_history import LossHistory, Point
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
_AXIS = 60  # as wide as "9.79e-04+"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChart:
    """What is drawn.

    Attributes:
        losses: of the run.
        first_step: steps done before this run.
        total_steps: steps this run will take; None: not known.
        is_last: whether there will be no more steps.
    """

    losses: LossHistory
    first_step: int
    total_steps: int | None
    is_last: bool = False

    @property
    def first_non_finite(self) -> int | None:
        """The first step whose loss is not finite, counted as the panel's step n/N counts."""
        before = self.losses.first_non_finite
        return None if before is None else self.first_step + before + 1

    @property
    def steps(self) -> int:
        """Steps that the width of the chart stands for."""
        return max(self.total_steps or 0, self.losses.count, 1)


def html(chart: LossChart, *, as_image: bool) -> str:
    """Draw the chart, or keep its place while there is nothing to draw.

    Args:
        chart: what to draw.
        as_image: whether it has to survive in a file.
    """
    values = [value for _, value in chart.losses.points if value is not None]
    if not values:
        low, high, picture = "", "", _waiting(chart)
    else:
        bottom, top = _limits(values)
        assert chart.losses.lowest is not None
        bottom = min(bottom, chart.losses.lowest)  # which stands among the figures
        low, high = figure_text(bottom), figure_text(top) + ("+" if max(values) > top else "")
        picture = _picture(chart, bottom=bottom, top=top, as_image=as_image)
    side = f"flex:none;width:{_AXIS - 6}px;padding-right:6px;text-align:right;{SMALL}"
    return (
        f'<div style="display:flex;margin-top:8px"><div style="{side};height:{HEIGHT}px;'
        "display:flex;flex-direction:column;justify-content:space-between;line-height:12px;"
        'font-size:11px;white-space:nowrap">'
        f"<span>{high} </span><span>loss </span><span>{low} </span></div>"
        f'<div style="flex:1 1 0%;min-width:0;height:{HEIGHT}px">{picture}</div></div>'
        f"{_steps_axis(chart)}"
    )


def text(chart: LossChart) -> str:
    """Return the curve as one line of blocks."""
    history = chart.losses
    line = spark(_thinned([value for _, value in history.points], 40)).ljust(40)
    known = history.lowest is not None
    ends = f"{figure_text(history.highest)} to {figure_text(history.lowest)}" if known else UNKNOWN
    note = _non_finite_text(chart)
    return f"loss {line} {ends}{'; ' + note if note else ''}"


def _waiting(chart: LossChart) -> str:
    none = "no step was finished" if chart.is_last else "waiting for the first step"
    words = "no finite loss yet" if chart.losses.count else none
    return (
        f'<div style="box-sizing:border-box;margin:2px 0;border-top:{RULE};border-bottom:{RULE};'
        f'height:{HEIGHT - 4}px;line-height:{HEIGHT - 6}px;text-align:center">{muted(words)}</div>'
    )


def _steps_axis(chart: LossChart) -> str:
    """Return the line under the chart: first and last step, and a loss that broke."""
    steps = chart.total_steps or chart.losses.count
    last = f"{chart.first_step + steps:,}" if steps else ""
    broken = _non_finite_text(chart)
    middle = f"{icon('✕', RED)} {escape(broken)}" if broken else muted("step")
    return (
        '<div style="font-size:11px;height:16px;line-height:16px;overflow:hidden;display:flex;'
        f'justify-content:space-between;padding-left:{_AXIS}px;white-space:nowrap">'
        f"{muted(f'{chart.first_step:,} ')}<span>{middle} </span>{muted(last)}</div>"
    )


def _non_finite_text(chart: LossChart) -> str:
    step = chart.first_non_finite
    return "" if step is None else f"loss first not finite at step {step:,}"


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return bottom and top of the axis; a few wild values do not flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    if high > usual + 4 * (usual - low) > low:
        high = usual + (usual - low)
    if high - low > 1e-9 * max(abs(high), abs(low)):
        return low, high
    margin = abs(low) / 2 or 0.5
    return low - margin, high + margin


def _thinned(values: Sequence[float | None], count: int) -> list[float | None]:
    """Return at most ``count`` means over equal stretches; a stretch that broke has none."""
    count = min(count, len(values))
    means: list[float | None] = []
    for number in range(count):
        part = values[number * len(values) // count : (number + 1) * len(values) // count]
        known = [value for value in part if value is not None]
        means.append(sum(known) / len(known) if len(known) == len(part) else None)
    return means


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Return an exponential mean without the bias of its start; it skips what is not finite."""
    keep = 1 - 2 / (1 + max(3.0, 0.04 * len(points)))
    total = weight = 0.0
    means: list[Point] = []
    for step, value in points:
        if value is not None:
            total, weight = keep * total + (1 - keep) * value, keep * weight + 1 - keep
        means.append((step, None if value is None else total / weight))
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


def _picture(chart: LossChart, *, bottom: float, top: float, as_image: bool) -> str:
    """Return the drawing with its description."""
    history, label = chart.losses, _label(chart)
    shape = ' fill="none" vector-effect="non-scaling-stroke" stroke-linecap="round"'
    raw = _path(history.points, steps=chart.steps, bottom=bottom, top=top)
    smooth = _path(_smoothed(history.points), steps=chart.steps, bottom=bottom, top=top)
    lines = "".join(
        f'<path d="M0 {y}H{_WIDTH}" stroke="{GREY}" stroke-opacity=".3"{shape}/>'
        for y in (3, HEIGHT // 2, HEIGHT - 3)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {HEIGHT}" role="img" '
        f'preserveAspectRatio="none" style="display:block;width:100%;height:{HEIGHT}px">'
        f"<title>{escape(label)}</title>{lines}"
        f"{_broken_mark(chart, shape)}"
        f'<path d="{raw}" stroke="{BLUE}" stroke-opacity=".45"{shape}/>'
        f'<path d="{smooth}" stroke="{BLUE}" stroke-width="2"{shape}/></svg>'
    )
    if not as_image:
        return svg
    return image(svg, alt=label, style=f"display:block;width:100%;height:{HEIGHT}px;margin:0")


def _label(chart: LossChart) -> str:
    """Return the chart in words."""
    history = chart.losses
    words = (
        f"Loss over {history.count:,} steps: first {figure_text(history.first)}, "
        f"lowest {figure_text(history.lowest)}, highest {figure_text(history.highest)}, "
        f"last {figure_text(history.last)}"
    )
    broken = _non_finite_text(chart)
    return f"{words}; {broken}" if broken else words


def _broken_mark(chart: LossChart, shape: str) -> str:
    """Return a dashed line where the loss first was not finite."""
    before = chart.losses.first_non_finite
    if before is None:
        return ""
    x = _WIDTH * (before + 1) / chart.steps
    return f'<path d="M{x:.1f} 0V{HEIGHT}" stroke="{RED}" stroke-dasharray="3 3"{shape}/>'
