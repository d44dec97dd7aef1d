"""KERNEL: strategies compared: each asked of the engines in turn, and all put back at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fsdp_magic.core.comparison import (
    WARM_UP_STEPS,
    CompareReport,
    CompareRequest,
    PutBackRequest,
    SetAsideRequest,
)
from fsdp_magic.core.errors import CellFailedError, OutOfMemoryOnRankError
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.specs.compare import CompareSpec, Variant
from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.notebook import display
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.screen import Nowhere
from fsdp_magic.panels import comparison as panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What one strategy did.

    Attributes:
        name: of the strategy, with what it adds: ``ddp+bf16``.
        losses: of every step, those that warm up too.
        seconds_per_step: of the steps that were measured; None: it did not run.
        samples_per_second: of all ranks; None where batches have no number of samples.
        peak_bytes: the most that was allocated, by rank.
        peak_memory: what that was made of, by rank.
        failure: why it did not run; empty: it did.
    """

    name: str
    losses: tuple[float, ...] = ()
    seconds_per_step: float | None = None
    samples_per_second: float | None = None
    peak_bytes: tuple[int | None, ...] = ()
    peak_memory: tuple[MemorySample | None, ...] = ()
    failure: str = ""

    @property
    def fullest(self) -> MemorySample | None:
        """The memory of the rank whose peak is the highest, at that moment."""
        known = [memory for memory in self.peak_memory if memory is not None]
        return max(known, key=lambda memory: memory.peak_allocated_bytes, default=None)


class Comparison:
    """Strategies compared.

    Attributes:
        world_size: ranks they ran on.
        strategies: what each did, in the order in which they ran.
        steps: that were measured of each.
        last_frame: the table, as HTML and as text.
    """

    def __init__(self, spec: CompareSpec, *, world_size: int, present: Iterable[str]) -> None:
        self.steps = spec.steps
        self.strategies: list[Compared] = []
        self.pending = [variant.name for variant in spec.variants(world_size=world_size)]
        self.world_size = world_size
        self._present = frozenset(present)
        self.last_frame = self._frame()

    def __getitem__(self, name: str) -> Compared:
        """Return what a strategy did, by its name as shown."""
        wanted = Variant.parsed(name).name
        return next(each for each in self.strategies if each.name == wanted)

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
        )
        return panel.html(view), panel.text(view)

    def _row(self, each: Compared) -> panel.ComparedView:
        return panel.ComparedView(
            name=each.name,
            is_present=each.name in self._present,
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
        return f"<Comparison over {self.steps} steps: {times}>"


def compare_on(
    engines: Engines,
    request: TrainRequest,
    comparison: Comparison,
    variants: Iterable[Variant],
    *,
    show: bool,
) -> None:
    """Run the last training cell under each strategy, and show the table as it grows.

    Args:
        engines: to ask.
        request: of the cell's last run.
        comparison: takes the results.
        variants: the strategies.
        show: show the table.

    Raises:
        CellFailedError: if the cell failed otherwise than for want of memory; everything is as
            before.
        KeyboardInterrupt: if it was interrupted; everything is as before.
    """
    drawn = display.Panel()
    everybody = range(comparison.world_size)
    with _set_aside(engines, everybody):
        for variant in variants:
            asked = _request(request, variant, steps=comparison.steps)
            comparison.add(_compared(engines, dict.fromkeys(everybody, asked), variant.name))
            if show and comparison.pending:
                drawn.draw(*comparison.last_frame, final=False)
    if show:
        drawn.draw(*comparison.last_frame, final=True)
        display.mark_shown(comparison)


@contextmanager
def _set_aside(engines: Engines, ranks: Iterable[int]) -> Iterator[None]:
    """Have the models set aside inside, and everything as before afterwards."""
    try:
        engines.ask("set_aside", dict.fromkeys(ranks, SetAsideRequest()), screen=Nowhere())
        yield
    finally:
        if engines.broken is None:
            engines.ask("put_back", dict.fromkeys(ranks, PutBackRequest()), screen=Nowhere())


def _request(request: TrainRequest, variant: Variant, *, steps: int) -> CompareRequest:
    """Return what is asked of a rank: the cell with its options, for so many steps."""
    spec = replace(
        request.spec,
        steps=steps + WARM_UP_STEPS,
        epochs=None,
        eval_every=None,
        eval_data=None,
        snapshot_every=None,
        trial=False,
        resume=False,
    )
    return CompareRequest(code=request.code, name=request.name, spec=spec, variant=variant)


def _compared(engines: Engines, requests: dict[int, CompareRequest], name: str) -> Compared:
    """Run the cell under one strategy; one that does not fit, or is refused, is a row too."""
    spec = requests[0].spec
    try:
        replies, _ = engines.ask("compare", requests, screen=Nowhere(), timeout=spec.timeout)
    except OutOfMemoryOnRankError as error:
        return Compared(name=name, failure=f"out of memory: {str(error).splitlines()[0]}")
    except CellFailedError as error:
        if not error.is_refusal:
            raise
        return Compared(name=name, failure=str(error).splitlines()[0])
    reports: list[CompareReport] = [replies[rank].report for rank in sorted(replies)]
    run = Run(run_id=0, world_size=len(reports), accumulate=spec.accumulate)
    run.finish([report.run for report in reports])
    count = min(report.measured_steps for report in reports)
    seconds = max((r.seconds for r in reports if r.seconds is not None), default=None)
    per_step = None if seconds is None or not count else seconds / count
    samples = run.samples_per_step
    return Compared(
        name=name,
        losses=tuple(run.losses),
        seconds_per_step=per_step,
        samples_per_second=None if per_step is None or not samples else samples / per_step,
        peak_bytes=tuple(run.peak_bytes),
        peak_memory=tuple(rank.peak_memory for rank in run.ranks),
    )


def _relative(ours: float, theirs: float) -> float:
    """Return how far a loss is from another, relative to it; losses that are not finite are far."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    return abs(ours - theirs) / max(abs(theirs), 1e-300)
