"""KERNEL: a search for a micro-batch size: engines are asked for steps of one size after the other.

What an engine changed is put back before it answers, so nothing here has to be undone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_magic.core.comparison import WARM_UP_STEPS, CompareReport, CompareRequest
from fsdp_magic.core.errors import CellFailedError, OutOfMemoryOnRankError, UsageError
from fsdp_magic.core.fastest_search import FastestSearch
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.search import LargestSearch, Predicted, Tried
from fsdp_magic.core.specs import TuneSpec
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.units import ranks_named
from fsdp_magic.notebook import display
from fsdp_magic.notebook.comparing import measured
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.probes import Probe, TunedStrategy
from fsdp_magic.notebook.rooms import Rooms
from fsdp_magic.notebook.screen import Nowhere
from fsdp_magic.notebook.search_endings import ending_of, nothing_fits
from fsdp_magic.notebook.tuned import Tuned

_TIMED_STEPS = {"memory": 1, "throughput": 4}
_FRAME_SECONDS = 0.5
_BEGIN = 8
"""Where a search begins that has no plan: the size of a training cell that names none."""
_SMALL = 2
"""Where one for speed begins: batch norm refuses a single sample, which is hardly the fastest."""


class Tuner:
    """Runs searches and draws them.

    Args:
        engines: to ask.
        request: of the cell.
        spec: what was asked for.
        tuned: takes what is found.
        rooms: what each rank has room for.
        sizes: that may be tried.
        show: draw the panel.
    """

    def __init__(
        self,
        engines: Engines,
        request: TrainRequest,
        spec: TuneSpec,
        tuned: Tuned,
        *,
        rooms: Rooms,
        sizes: Sequence[int],
        show: bool,
    ) -> None:
        self._engines = engines
        self._request = request
        self._spec = spec
        self._tuned = tuned
        self._rooms = rooms
        self._sizes = sizes
        self._show = show
        self._panel = display.Panel()
        self._began = self._drawn_at = time.monotonic()
        self._refused: OutOfMemoryOnRankError | None = None
        self._lengths: list[float] = []
        self._is_finite = True

    # -- searching

    def search(self, name: str, variant: Variant | None, predicted: Predicted | None) -> None:
        """Find the size under one strategy.

        Args:
            name: of the strategy.
            variant: how models that are set aside are spread; None: they are as they are.
            predicted: peak of any size on the rank with least room; None: there is no plan.

        Raises:
            CellFailedError: if the cell failed otherwise than for want of memory, or no size
                fits the models as they are.
        """
        tuned = self._tuned
        each = TunedStrategy(name=name, is_present=variant is None, sizes=self._sizes)
        tuned.table.append(each)
        tuned.pending.remove(name)
        tuned.state, tuned.planned = "searching", self._curve(predicted)

        def probe(size: int) -> Probe:
            each.probes.append(made := self._probe(size, variant))
            tuned.trying = None
            return made

        try:
            pick = self._fastest(probe) if tuned.objective == "throughput" else 0
            if tuned.objective == "memory":
                pick = self._largest(probe, predicted)
        except CellFailedError as error:
            if variant is None or not error.is_refusal:
                raise
            each.failure = str(error).splitlines()[0]
            return
        finally:
            tuned.trying = None
            each.expected = self._search(predicted, each.probes).expected()
        each.micro_batch_size, each.sizes = pick, self._sizes
        each.accumulate = self._accumulate(pick)
        each.ended_by, each.reason = ending_of(
            each, self._spec, self._request.spec, most=tuned.most
        )
        if not pick:
            each.failure = each.reason
            if variant is None:
                raise nothing_fits(each, refused=self._refused, ranks=tuned.world_size)

    def _largest(self, probe: Callable[[int], Probe], predicted: Predicted | None) -> int:
        search, made = self._search(predicted), list[Probe]()
        while (size := search.next()) is not None:
            try:
                made.append(probe(size))
                search.add(_tried(made[-1]))
            except CellFailedError as error:
                if size > 1 or len(self._sizes) < 2:
                    raise
                # a single sample may be no batch, as for batch norm; a bug is one of 2 as well
                self._sizes = self._sizes[1:]
                raised = {f"{f.exception_type}: {f.message}" for f in error.exceptions.values()}
                said = "; ".join(sorted(raised))
                self._tuned.notes.append(f"a micro-batch of 1 is left out: it raised {said}")
                search = self._search(predicted, made)
        return search.largest

    def _search(self, predicted: Predicted | None, probes: Sequence[Probe] = ()) -> LargestSearch:
        """Return the search for the largest size, after probes."""
        search = LargestSearch(
            self._sizes,
            room=self._rooms.least,
            rest=self._rooms.held_bytes,
            predicted=predicted,
            first=_BEGIN,
        )
        for each in probes:
            search.add(_tried(each))
        return search

    def _fastest(self, probe: Callable[[int], Probe]) -> int:
        search = FastestSearch(self._sizes, first=_SMALL)
        while (size := search.next()) is not None:
            made = probe(size)
            if made.fits and made.samples_per_second is None:
                raise UsageError(f"--objective throughput {_untimed(made)}; leave it out")
            search.add(size, fits=made.fits, rate=made.samples_per_second)
        return search.fastest

    # -- one size

    def _probe(self, size: int, variant: Variant | None) -> Probe:
        """Have every rank take steps of one size, and judge what they report together."""
        self._tuned.trying = size
        self.draw()
        steps = WARM_UP_STEPS + _TIMED_STEPS[self._tuned.objective]
        spec = replace(self._request.spec, micro_batch_size=size, steps=steps)
        asked = {
            rank: CompareRequest(
                code=self._request.code,
                name=self._request.name,
                spec=spec,
                variant=variant,
                room_bytes=int(self._rooms.free(rank)),
                moves_schedulers=False,  # one near its end would refuse steps that nobody keeps
            )
            for rank in range(self._tuned.world_size)
        }
        try:
            replies, _ = self._engines.ask(
                "compare", asked, screen=Nowhere(), timeout=spec.timeout, on_tick=self._tick
            )
        except OutOfMemoryOnRankError as error:
            self._refused = error
            ranks = [r for r, f in error.exceptions.items() if f.kind == "out_of_memory"]
            why = f"runs out of memory on {ranks_named(tuple(sorted(ranks)))}"
            return Probe(micro_batch_size=size, fits=False, why=why)
        except CellFailedError as error:
            if not error.is_refusal:  # what raises may do so for its size
                error.add_line(f"%fsdp_tune tried a micro-batch of {size:,}; all is as before it.")
                raise
            if self._tuned.most is not None or size == self._sizes[0]:
                raise
            why = "the data fill no step of it"
            return Probe(micro_batch_size=size, fits=False, why=why, is_end_of_data=True)
        return self._judged(size, [replies[rank].report for rank in sorted(replies)])

    def _judged(self, size: int, reports: Sequence[CompareReport]) -> Probe:
        run, per_step = measured(reports, accumulate=self._request.spec.accumulate)
        self._note_lengths(reports)
        if self._is_finite and not all(map(math.isfinite, run.losses)):
            self._is_finite = False
            self._tuned.notes.append(f"a loss of micro-batch {size:,} was not finite")
        peaks = tuple(report.run.peak_memory.peak_allocated_bytes for report in reports)
        load, why = self._rooms.judged(peaks)
        samples = run.samples_per_step
        return Probe(
            micro_batch_size=size,
            fits=not why,
            peak_bytes=peaks,
            load_bytes=load,
            samples_per_second=None if per_step is None or not samples else samples / per_step,
            seconds_per_step=per_step,
            samples_per_step=samples,
            why=why,
        )

    def _note_lengths(self, reports: Sequence[CompareReport]) -> None:
        """Say so where samples differ in length: memory is that of the steps that were tried."""
        for records in (report.run.records for report in reports):
            counts = zip(records.tokens or (), records.samples, strict=False)
            self._lengths += [tokens / samples for tokens, samples in counts if samples]
        if self._lengths and max(self._lengths) > min(self._lengths):
            low, high = round(min(self._lengths)), round(max(self._lengths))
            self._tuned.differing = (
                f"samples of the steps that were tried had {low:,} to {high:,} tokens on average; "
                "longer ones take more: leave a larger --margin, or pad all to one length"
            )

    def _accumulate(self, size: int) -> int:
        spec, ranks = self._request.spec, self._tuned.world_size
        if spec.global_batch_size is None or not size:
            return spec.accumulate
        return spec.global_batch_size // (size * (ranks if spec.data_sharding == "auto" else 1))

    # -- drawing

    def _curve(self, predicted: Predicted | None) -> list[tuple[int, int]]:
        """Return a plan as points, from the smallest size to beyond what it says fits."""
        if predicted is None or not self._sizes:
            return []
        largest = self._search(predicted).next() or 1
        end = min(self._sizes[-1], max(largest + 2, largest * 3 // 2))
        sizes = sorted({1 + (end - 1) * part // 24 for part in range(25)})
        return [(size, round(predicted(size))) for size in sizes]

    def _tick(self) -> None:
        if time.monotonic() - self._drawn_at >= _FRAME_SECONDS:
            self.draw()

    def draw(self, *, final: bool = False) -> None:
        """Draw the search as it is."""
        self._drawn_at = time.monotonic()
        self._tuned.seconds = self._drawn_at - self._began
        if self._show or final:
            frame = self._tuned.frame()
            if self._show:
                self._panel.draw(*frame, final=final)


def _untimed(probe: Probe) -> str:
    """Return why nobody knows how many samples a second a size makes."""
    if probe.samples_per_step is None:
        return "counts samples, and batches have no number of them (dim 0 of their tensors)"
    steps = WARM_UP_STEPS + _TIMED_STEPS["throughput"]
    return f"takes {steps} steps, and the run ended before: fsdp.stop() or the end of the data"


def _tried(probe: Probe) -> Tried:
    return Tried(size=probe.micro_batch_size, fits=probe.fits, peak=probe.load_bytes)
