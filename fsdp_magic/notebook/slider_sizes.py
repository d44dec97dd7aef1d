"""KERNEL: from the sizes that were tried to what the slider says of every size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fsdp_magic.core.search import Predicted
from fsdp_magic.notebook.probes import Probe, TunedStrategy
from fsdp_magic.panels.slider_view import SliderData, SliderSize

_BEYOND = 3
"""The slider goes to this half of the pick, or to the largest size that was tried."""


def slider_data(
    each: TunedStrategy, *, capacity_bytes: int | None, margin: float
) -> SliderData | None:
    """Return what a slider offers: sizes up to some that do not fit; None: nothing was found.

    Args:
        each: what was found for the models as they are spread.
        capacity_bytes: what tensors may take on the rank with least.
        margin: the share of the device that stays free.
    """
    if not each.micro_batch_size:
        return None
    measured = {probe.micro_batch_size: probe for probe in each.probes}
    end = max(*measured, each.micro_batch_size * _BEYOND // 2)
    sizes = sorted({size for size in each.sizes if size <= end} | measured.keys())
    rates = [(p.micro_batch_size, p.samples_per_second) for p in each.probes]
    known = sorted((size, rate) for size, rate in rates if rate is not None)
    return SliderData(
        sizes=[
            _slider_size(size, measured.get(size), each.expected, _rate_at(size, known))
            for size in sizes
        ],
        value=each.micro_batch_size,
        capacity_bytes=capacity_bytes,
        margin=margin,
    )


def _slider_size(
    size: int, probe: Probe | None, expected: Predicted | None, rate: float | None
) -> SliderSize:
    if probe is not None and probe.load_bytes is not None:
        return SliderSize(
            micro_batch_size=size,
            peak_bytes=probe.load_bytes,
            samples_per_second=probe.samples_per_second,
            is_measured=True,
        )
    return SliderSize(
        micro_batch_size=size,
        peak_bytes=None if expected is None else max(0, round(expected(size))),
        samples_per_second=rate,
        ran_out=probe is not None and probe.ran_out,
    )


def _rate_at(size: int, known: Sequence[tuple[int, float]]) -> float | None:
    """Return samples a second along the line between measured sizes; beyond them nobody knows."""
    for (left, at_left), (right, at_right) in pairwise(known):
        if left <= size <= right:
            return at_left + (at_right - at_left) * (size - left) / (right - left)
    return None
