"""KERNEL: what a search for a micro-batch size found: its pick, and the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.specs.tune import Objective
from fsdp_magic.core.wording import quoted
from fsdp_magic.notebook import display
from fsdp_magic.notebook.probes import Probe, TunedStrategy
from fsdp_magic.notebook.slider import slider
from fsdp_magic.notebook.slider_sizes import slider_data
from fsdp_magic.panels import tuner
from fsdp_magic.panels.tuner_view import ProbeView, TunedRow, TunerState, TunerView


class Tuned:
    """A search and what it found; while it goes on, what it has found so far.

    Args:
        objective: what was looked for.
        margin: the share of each device that stays free.
        world_size: ranks.
        names: of the strategies to come.
        is_table: whether strategies were asked for.
        is_endless: whether neither the data nor anybody says where sizes end.
        use: makes a size the default of the next training cell; raises a ``UsageError`` if it
            cannot.

    Attributes:
        table: what was found under each strategy.
        state: where the search is.
        most: the largest size of which the data fill a step; None: no end is known.
        room_bytes: what tensors may take on the rank with least room, the margin included.
        planned: (size, predicted peak) of the strategy that is searched.
        notes: sentences a person should read.
        differing: what to say of samples that differ in length; nothing: they do not.
        seconds: that it took so far.
        trying: the size under way; None: none is.
        last_frame: the panel, as HTML and as text.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        margin: float,
        world_size: int,
        names: Iterable[str],
        is_table: bool,
        is_endless: bool,
        use: Callable[[int], None],
    ) -> None:
        self.objective: Objective = objective
        self.margin = margin
        self.world_size = world_size
        self.pending = list(names)
        self.table: list[TunedStrategy] = []
        self.state: TunerState = "planning"
        self.most: int | None = None
        self.room_bytes: int | None = None
        self.planned: Sequence[tuple[int, int]] = ()
        self.notes: list[str] = []
        self.differing = ""
        self.seconds = 0.0
        self.trying: int | None = None
        self.last_frame: tuple[str, str] = ("", "")
        self._is_table = is_table
        self._is_endless = is_endless
        self._use = use

    @property
    def best(self) -> TunedStrategy | None:
        """The strategy to take: with the largest pick, or the fastest; None: nothing fits."""
        found = [each for each in self.table if each.micro_batch_size]
        return max(found, key=lambda each: (self._worth(each), each.is_present), default=None)

    def _worth(self, each: TunedStrategy) -> float:
        if self.objective == "throughput":
            return each.samples_per_second or 0.0
        return each.micro_batch_size or 0

    @property
    def present(self) -> TunedStrategy | None:
        """What was found for the models as they are spread; None: that was not searched."""
        return next((each for each in self.table if each.is_present), None)

    @property
    def micro_batch_size(self) -> int:
        """The pick for the models as they are spread, else the best one's; 0: none fits."""
        each = self.present or self.best
        return 0 if each is None else each.micro_batch_size or 0

    @property
    def accumulate(self) -> int:
        """Micro-batches per step with that size."""
        each = self.present or self.best
        return 1 if each is None else each.accumulate

    @property
    def probes(self) -> list[Probe]:
        """Every size that was tried, under any strategy, in the order in which they ran."""
        return [probe for each in self.table for probe in each.probes]

    def choose(self, micro_batch_size: int) -> None:
        """Make a size the default of the next training cell.

        Raises:
            UsageError: if it is no size of a step, or one as small was seen to run out of memory.
        """
        size = micro_batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                f"micro_batch_size {quoted(size)} cannot work; it takes a whole number from 1"
            )
        if self.most is not None and size > self.most:
            raise UsageError(f"the data fill no step of {size:,}; it takes up to {self.most:,}")
        probes = [] if self.present is None else self.present.probes
        ran_out = [p for p in probes if p.ran_out and p.micro_batch_size <= size]
        if ran_out:
            first = min(ran_out, key=lambda p: p.micro_batch_size)
            raise UsageError(
                f"a micro-batch of {first.micro_batch_size:,} {first.why}; --micro-batch-size "
                f"{size} in the training cell takes it all the same"
            )
        self._use(size)

    def show(self) -> None:
        """Show the panel, and the slider where anywidget is installed."""
        display.show(*self.frame())
        display.mark_shown(self)
        self.show_slider()

    def show_slider(self) -> None:
        """Show the slider in a notebook, where there is a size to choose and anywidget for it."""
        each = self.present
        if each is None:
            return
        data = slider_data(each, capacity_bytes=self.room_bytes, margin=self.margin)
        if data is not None and display.is_notebook():
            widget = slider(data, self.choose)
            if widget is not None:
                display.show_widget(widget)

    def frame(self) -> tuple[str, str]:
        """Return the panel at this moment, as HTML and as text, and remember it."""
        view = self.view()
        self.last_frame = (tuner.html(view), tuner.text(view))
        return self.last_frame

    def view(self) -> TunerView:
        """Return what the panel shows at this moment."""
        shown = self.table[-1] if self.table else None
        return TunerView(
            state=self.state,
            objective=self.objective,
            strategy="" if shown is None else shown.name,
            probes=[] if shown is None else [_probe_view(each) for each in shown.probes],
            trying=self.trying,
            planned=self.planned,
            capacity_bytes=self.room_bytes,
            margin=self.margin,
            pick=None if shown is None else shown.micro_batch_size or _largest(shown),
            most=None if shown is None or self._is_endless else shown.sizes[-1],
            accumulate=1 if shown is None else shown.accumulate,
            ranks=self.world_size,
            ended_by="" if shown is None else shown.reason,
            rows=[self._row(each) for each in self.table] if self._is_table else [],
            pending=self.pending if self._is_table else [],
            seconds=self.seconds,
            notes=[*filter(None, [self.differing]), *self.notes],
            stamp=display.stamp(),
        )

    def _row(self, each: TunedStrategy) -> TunedRow:
        picked = each.picked
        return TunedRow(
            name=each.name,
            is_present=each.is_present,
            micro_batch_size=each.micro_batch_size,
            samples_per_step=None if picked is None else picked.samples_per_step,
            samples_per_second=each.samples_per_second,
            peak_bytes=max(each.peak_bytes, default=None),
            probes=len(each.probes),
            ended_by=each.ended_by,
            failure=each.failure,
            is_best=each is self.best,
        )

    def _ipython_display_(self) -> None:
        """Show it where a cell ends in it, unless the cell has just shown it."""
        if not display.is_shown(self):
            self.show()

    def __repr__(self) -> str:
        return f"<Tuned: micro-batch {self.micro_batch_size} after {len(self.probes)} probes>"


def _largest(each: TunedStrategy) -> int | None:
    return max((p.micro_batch_size for p in each.probes if p.fits), default=None)


def _probe_view(probe: Probe) -> ProbeView:
    return ProbeView(
        micro_batch_size=probe.micro_batch_size,
        fits=probe.fits,
        peak_bytes=probe.load_bytes,
        samples_per_second=probe.samples_per_second,
        why=probe.why,
    )
