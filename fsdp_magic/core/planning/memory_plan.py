"""A plan: peak memory of any micro-batch size and the largest that fits, by strategy; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.planning.allocator import largest_that_fits
from fsdp_magic.core.planning.device import Device
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.peak_curve import MOST_SAMPLES, PeakCurve
from fsdp_magic.core.planning.peak_parts import PeakPart, by_kind, parts_of
from fsdp_magic.core.planning.roofline import Pace, pace_of
from fsdp_magic.core.planning.step_trace import Kind, StepTrace
from fsdp_magic.core.planning.strategies import ledger_of, overlay_of
from fsdp_magic.core.planning.terms import Terms, terms_of
from fsdp_magic.core.planning.timeline import Timeline, timeline_of
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.wording import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The largest micro-batch size, as an interval; the safe end is recommended.

    Attributes:
        safe: fits with the allocator's fragmentation; 0: not even one sample fits.
        ideal: fits if no memory were lost to fragmentation.
    """

    safe: int
    ideal: int

    def __str__(self) -> str:
        if self.is_open:
            return f"{MOST_SAMPLES:,} or more"
        if not self.ideal:
            return "none"
        beyond = f" to {self.ideal:,}" if self.ideal > self.safe else ""
        return f"{self.safe:,}{beyond}"

    @property
    def is_open(self) -> bool:
        """Whether memory does not set the end: no size that was looked at is too large."""
        return self.ideal >= MOST_SAMPLES


@dataclass(slots=True, kw_only=True)
class StrategyPlan:
    """What one strategy needs on a rank.

    Attributes:
        name: as ``--strategies`` names it: ``full_shard+bf16+cpu_offload``.
        trace: of the step, in its precision.
        setting: how it is spread.
        ledger: what a rank takes and gives back over two steps.
        curve: its peak for any micro-batch size.
    """

    name: str
    trace: StepTrace
    setting: Setting
    ledger: Ledger = field(init=False, repr=False)
    curve: PeakCurve = field(init=False, repr=False)
    _largest: dict[Device, Interval] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = ledger_of(self.trace, self.setting)
        self.curve = PeakCurve(self.ledger)

    def changed(self, **changes: Any) -> StrategyPlan:
        """Return the plan of the same step spread otherwise; see ``Setting``."""
        setting = dataclasses.replace(self.setting, **changes)
        return StrategyPlan(name=setting.strategy, trace=self.trace, setting=setting)

    def peak_bytes(self, micro_batch_size: int) -> int:
        """Return the most bytes allocated on a rank."""
        return round(self.curve.at(micro_batch_size))

    def peak_phase(self, micro_batch_size: int) -> str:
        """Return the phase in which most is allocated: ``step 2: backward``."""
        return self.ledger.phase_of(self.curve.entry(micro_batch_size))

    def kinds(self, micro_batch_size: int) -> dict[Kind, int]:
        """Return the bytes of each kind at the peak, the largest first."""
        held = self.ledger.live_after(self.curve.entry(micro_batch_size))
        return by_kind(held, micro_batch_size)

    def parts(self, micro_batch_size: int) -> tuple[PeakPart, ...]:
        """Return what the peak is made of, by kind and place, the largest first."""
        held = self.ledger.live_after(self.curve.entry(micro_batch_size))
        return parts_of(held, micro_batch_size, self.trace)

    def optimizer_elements(self) -> dict[str, int]:
        """Return how many elements of each trained parameter the optimizer of a rank has."""
        overlay = overlay_of(self.trace, self.setting)
        trained = (p for p in self.trace.parameters.values() if p.trained)
        return {p.name: overlay.optimizer_elements(p) for p in trained}

    def timeline(self, micro_batch_size: int) -> Timeline:
        """Return the memory of a rank over two steps."""
        return timeline_of(self.ledger, micro_batch_size, strategy=self.name)

    def largest(self, device: Device) -> Interval:
        """Return the largest micro-batch size for a device.

        A CPU has no caching allocator: what is given back is there for anything, so both ends of
        the interval are one.
        """
        if device not in self._largest:
            ideal = self.curve.largest(device.usable_bytes)
            safe = ideal
            if device.kind == "cuda" and 0 < ideal < MOST_SAMPLES:
                safe = largest_that_fits(self.ledger, device.usable_bytes, ideal)
            self._largest[device] = Interval(safe=safe, ideal=ideal)
        return self._largest[device]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPlan:
    """Plans by strategy, for one device.

    Attributes:
        device: what it is for.
        world_size: ranks.
        strategies: by name, in the order asked for.
        micro_batch_size: what was asked to be shown; None: each strategy's largest.
        model: what is planned, in words: ``GPT2LMHeadModel, 1.6B parameters``.
        notes: sentences a person should read.
        untraced: why a strategy that was asked for has no plan, in a line, by name.
    """

    device: Device
    world_size: int
    strategies: Mapping[str, StrategyPlan]
    micro_batch_size: int | None = None
    model: str = ""
    notes: tuple[str, ...] = ()
    untraced: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, strategy: str) -> StrategyPlan:
        """Return the plan of a strategy, by any name that ``--strategies`` takes.

        Raises:
            UsageError: if it was not planned.
        """
        if strategy in self.strategies:
            return self.strategies[strategy]
        known, name = ", ".join(self.strategies), Variant.parsed(strategy).name
        if name in self.strategies:
            return self.strategies[name]
        why = f": {self.untraced[name]}" if name in self.untraced else ""
        raise UsageError(f"{quoted(strategy)} was not planned{why}; planned: {known}")

    @property
    def intervals(self) -> dict[str, Interval]:
        """The largest micro-batch size of each strategy, safe and ideal."""
        return {name: plan.largest(self.device) for name, plan in self.strategies.items()}

    @property
    def max_micro_batch_size(self) -> dict[str, int]:
        """The largest micro-batch size of each strategy that is safe; 0: not even one sample."""
        return {name: interval.safe for name, interval in self.intervals.items()}

    def shown_size(self, strategy: str) -> int:
        """Return the micro-batch size at which a strategy is shown: asked for, or its largest."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        interval = self[strategy].largest(self.device)
        return 1 if interval.is_open else max(1, interval.safe)

    def peak_bytes(self, strategy: str, micro_batch_size: int) -> int:
        """Return the most bytes allocated on a rank."""
        return self[strategy].peak_bytes(micro_batch_size)

    def timeline(self, strategy: str, micro_batch_size: int | None = None) -> Timeline:
        """Return the memory of a rank over two steps."""
        return self[strategy].timeline(micro_batch_size or self.shown_size(strategy))

    def parts(self, strategy: str, micro_batch_size: int | None = None) -> tuple[PeakPart, ...]:
        """Return what the peak is made of, by kind and place, the largest first."""
        return self[strategy].parts(micro_batch_size or self.shown_size(strategy))

    def terms(self, strategy: str | None = None, micro_batch_size: int | None = None) -> Terms:
        """Return every term of a strategy's figure with its source; the recommended one's."""
        plan = self[strategy or self.recommended]
        size = micro_batch_size or self.shown_size(plan.name)
        return terms_of(
            plan.ledger,
            plan.parts(size),
            self.device,
            micro_batch_size=size,
            phase=plan.peak_phase(size),
        )

    def paces(self) -> dict[str, Pace]:
        """Return how fast the roofline has each strategy that fits, where it is known."""
        found = {}
        for name, plan in self.strategies.items():
            size = self.shown_size(name) if plan.largest(self.device).safe else 0
            pace = pace_of(plan.trace, plan.setting, self.device.card, micro_batch_size=size)
            if pace is not None:
                found[name] = pace
        return found

    def ranking(self) -> dict[str, int]:
        """Return the place of each strategy by time per sample, 1 the fastest, equal ones alike."""
        paces = self.paces()
        ordered = sorted(pace.seconds_per_sample for pace in paces.values())
        return {name: 1 + ordered.index(pace.seconds_per_sample) for name, pace in paces.items()}

    @property
    def recommended(self) -> str:
        """The strategy that is shown: the fastest that fits.

        Where speeds are not known it is that of most samples, of those that offload nothing if
        any of them fits.
        """
        ranking, sizes = self.ranking(), self.max_micro_batch_size
        if ranking:
            return min(ranking, key=ranking.__getitem__)
        offloads = {name: plan.setting.cpu_offload for name, plan in self.strategies.items()}
        return max(sizes, key=lambda name: (bool(sizes[name]), not offloads[name], sizes[name]))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {each}" for name, each in self.intervals.items())
        return (
            f"<MemoryPlan for {self.world_size} x {self.device.name}: largest micro-batch {sizes}>"
        )
