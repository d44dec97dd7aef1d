"""What the batch-size slider says of each size, and its stand-in where no kernel runs; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_magic.core.units import bytes_text
from fsdp_magic.panels.parts import GREEN, GREY, ORANGE, RED, card, escape, icon
from fsdp_magic.panels.tuner_table import rate_text

_MOST = 512
"""Steps of a slider: more would be finer than its pixels, and heavy to send."""


class Judgement(NamedTuple):
    """What would come of a size: a sign, its colour, and the words that say the same."""

    sign: str
    colour: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SliderSize:
    """One size that may be taken.

    Attributes:
        micro_batch_size: samples per rank per forward.
        peak_bytes: expected or measured on the rank nearest to its end; None: not known.
        samples_per_second: of all ranks; None: not known.
        is_measured: whether the figures are of a probe.
        ran_out: whether a probe of it ran out of memory.
    """

    micro_batch_size: int
    peak_bytes: int | None = None
    samples_per_second: float | None = None
    is_measured: bool = False
    ran_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SliderData:
    """What a slider offers.

    Attributes:
        sizes: that may be taken, ascending; of very many some are left out.
        value: the size at which it stands, one of them.
        capacity_bytes: what tensors may take on the rank with least; None: not known.
        margin: the share of the device that stays free, 0 to 1.
    """

    sizes: Sequence[SliderSize]
    value: int
    capacity_bytes: int | None = None
    margin: float = 0.05

    def __post_init__(self) -> None:
        found = [size.micro_batch_size for size in self.sizes]
        assert self.value in found, f"{self.value} is none of {found}"
        assert found == sorted(set(found)), found

    @property
    def offered(self) -> list[SliderSize]:
        """The sizes at which the slider stops: all, or those measured and some between them."""
        every = -(-len(self.sizes) // _MOST)
        return [
            size
            for number, size in enumerate(self.sizes)
            if not number % every
            or size.is_measured
            or size.ran_out
            or size.micro_batch_size == self.value
        ]

    def share(self, size: SliderSize) -> float | None:
        """Return how much of the capacity a size takes; None: not known."""
        if size.peak_bytes is None or not self.capacity_bytes:
            return None
        return size.peak_bytes / self.capacity_bytes

    def judgement(self, size: SliderSize) -> Judgement:
        """Return whether a size fits."""
        share = self.share(size)
        if size.ran_out:
            return Judgement("✕", RED, "ran out of memory")
        if share is None:
            return Judgement("○", GREY, "not known whether it fits")
        if share > 1:
            return Judgement("✕", RED, "would run out of memory")
        if share > 1 - self.margin:
            return Judgement("▲", ORANGE, "inside the margin")
        return Judgement("✓", GREEN, "fits")

    def line(self, size: SliderSize) -> str:
        """Return what a size takes: ``24 → 75.7 GiB of 80.0 GiB (95 %), 412 samples/s, measured``.

        The words of its judgement follow.
        """
        share = self.share(size)
        of = "" if share is None else f" of {bytes_text(self.capacity_bytes)} ({100 * share:.0f} %)"
        parts = []
        if size.peak_bytes is not None:
            parts.append(f"{bytes_text(size.peak_bytes)}{of}")
        if size.samples_per_second is not None:
            parts.append(f"{rate_text(size.samples_per_second)} samples/s")
        if parts:
            parts.append("measured" if size.is_measured else "expected")
        return f"{size.micro_batch_size:,} → {', '.join([*parts, self.judgement(size).words])}"


def uses_text(size: int) -> str:
    """Return what a size that was taken is for."""
    return f"the next %%fsdp_train uses {size:,}"


def html(data: SliderData, *, value: int) -> str:
    """Return what stands in a saved notebook in place of the slider."""
    size = _at(data, value)
    sign, colour, _ = data.judgement(size)
    content = (
        f"<div><b>Batch size </b> {icon(sign, colour)} {escape(data.line(size))} </div>"
        f'<div style="opacity:.7">{escape(uses_text(value))}</div>'
    )
    return card(content, label="Batch size")


def text(data: SliderData, *, value: int) -> str:
    """Return the same as a line of text."""
    return f"Batch size  {data.line(_at(data, value))}; {uses_text(value)}"


def _at(data: SliderData, value: int) -> SliderSize:
    return next(size for size in data.sizes if size.micro_batch_size == value)
