"""KERNEL: what strategies did that were compared, and the table of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_magic.core.comparison import WARM_UP_STEPS
from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.core.specs.compare import Variant, as_built
from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.core.units import bytes_text
from fsdp_magic.notebook import display
from fsdp_magic.panels import comparison as panel


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compared:
    """What one strategy did.

    Memory is counted beyond what the process held without the model: that of data, and of what
    libraries keep from their first use on, is in ``idle_bytes``.

    Attributes:
        name: of the strategy, with what it adds: ``ddp+bf16``.
        losses: of every step, those that warm up too.
        seconds_per_step: of the steps that were measured; None: it did not run.
        samples_per_second: of all ranks; None where batches have no number of samples.
        peak_bytes: the most that was allocated, by rank.
        peak_memory: what that was made of, by rank.
        idle_bytes: what was allocated when the model was gone, by rank.
        failure: why it did not run; empty: it did.
        is_present: whether the models are spread so.
    """

    name: str
    losses: tuple[float, ...] = ()
    seconds_per_step: float | None = None
    samples_per_second: float | None = None
    peak_bytes: tuple[int | None, ...] = ()
    peak_memory: tuple[MemorySample | None, ...] = ()
    idle_bytes: tuple[int, ...] = ()
    failure: str = ""
    is_present: bool = False

    @property
    def fullest(self) -> MemorySample | None:
        """The memory of the rank whose peak is the highest, at that moment."""
        known = [memory for memory in self.peak_memory if memory is not None]
        return max(known, key=lambda memory: memory.peak_allocated_bytes, default=None)

    def __repr__(self) -> str:
        if self.failure:
            return f"<{self.name}: {self.failure}>"
        seconds = self.seconds_per_step
        peak = None if self.fullest is None else self.fullest.peak_allocated_bytes
        time = "not timed" if seconds is None else f"{1000 * seconds:.1f} ms a step"
        return f"<{self.name}: {time}, peak {bytes_text(peak)}>"


class Comparison:
    """Strategies compared.

    Args:
        variants: what is compared.
        built: how the models are spread.
        steps: that are measured of each.
        world_size: ranks they run on.

    Attributes:
        strategies: what each did, in the order in which they ran.
        pending: names of those that have not run yet.
        last_frame: the table, as HTML and as text.
    """

    def __init__(
        self,
        variants: Iterable[Variant],
        built: Sequence[ModelSpec] = (),
        *,
        steps: int,
        world_size: int,
    ) -> None:
        self.steps = steps
        self.world_size = world_size
        self.strategies: list[Compared] = []
        self.pending = [variant.name for variant in variants]
        self._as_built = as_built(built)
        self.last_frame = self._frame()

    def __getitem__(self, name: str) -> Compared:
        """Return what a strategy did, by its name as shown; hybrid_shard's size may be left out.

        Raises:
            KeyError: if it was not compared.
        """
        wanted = _shown(name)
        for each in self.strategies:
            if wanted in (each.name, re.sub(":[0-9]+", "", each.name)):
                return each
        names = ", ".join(each.name for each in self.strategies) or "none"
        raise KeyError(f"{name} was not compared; compared: {names}")

    def add(self, compared: Compared) -> None:
        """Take what a strategy did."""
        self.strategies.append(compared)
        self.pending.remove(compared.name)
        self.last_frame = self._frame()

    @property
    def largest_difference(self) -> float | None:
        """The largest relative difference of any loss from that of the first strategy."""
        known = [d for each in self.strategies if (d := self._difference(each)) is not None]
        return max(known, default=None)

    def show(self) -> None:
        """Show the table."""
        display.show(*self.last_frame)
        display.mark_shown(self)

    def _frame(self) -> tuple[str, str]:
        view = panel.ComparisonView(
            rows=[self._row(each) for each in self.strategies],
            pending=self.pending,
            steps=self.steps,
            warm_up=WARM_UP_STEPS,
            ranks=self.world_size,
            stamp=display.stamp(),
            notes=self._notes(),
        )
        return panel.html(view), panel.text(view)

    def _notes(self) -> list[str]:
        idle = max((max(each.idle_bytes, default=0) for each in self.strategies), default=0)
        notes = []
        if self._as_built:
            notes.append(f"What a row does not name is as the model was built: {self._as_built}")
        if idle:
            notes.append(
                "Memory is counted beyond what a rank holds without the model, data and libraries: "
                f"{bytes_text(idle)}"
            )
        return notes

    def _row(self, each: Compared) -> panel.ComparedView:
        return panel.ComparedView(
            name=each.name,
            is_present=each.is_present,
            losses=each.losses,
            difference=self._difference(each),
            seconds_per_step=each.seconds_per_step,
            samples_per_second=each.samples_per_second,
            memory=each.fullest,
            peak_bytes=each.peak_bytes,
            failure=each.failure,
        )

    def _difference(self, each: Compared) -> float | None:
        first = next((other.losses for other in self.strategies if other.losses), ())
        pairs = list(zip(each.losses, first, strict=False))
        if not pairs:
            return None
        return max(_relative(ours, theirs) for ours, theirs in pairs)

    def _ipython_display_(self) -> None:
        """Show it where a cell ends in it, unless the cell has just shown it."""
        if not display.is_shown(self):
            self.show()

    def __repr__(self) -> str:
        times = ", ".join(
            f"{each.name} {1000 * each.seconds_per_step:.1f} ms"
            if each.seconds_per_step is not None
            else f"{each.name} did not run"
            for each in self.strategies
        )
        steps = f"{self.steps} step{'s' if self.steps != 1 else ''}"
        return f"<Comparison over {steps}: {times}>"


def _shown(name: str) -> str:
    """Return the name of a strategy as it is shown; what is none stays."""
    try:
        return Variant.parsed(name).name
    except UsageError:
        return name


def _relative(ours: float, theirs: float) -> float:
    """Return how far a loss is from another, relative to it; losses that are not finite are far."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    return abs(ours - theirs) / max(abs(theirs), 1e-300)
