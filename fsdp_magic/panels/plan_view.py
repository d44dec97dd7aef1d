"""A plan as it is shown: rows, the timeline of one strategy, what to change; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_magic.core.planning.advice import advice_for
from fsdp_magic.core.planning.memory_plan import Interval, MemoryPlan
from fsdp_magic.core.planning.roofline import Pace
from fsdp_magic.core.planning.step_trace import Kind
from fsdp_magic.core.planning.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One strategy as it is shown.

    Attributes:
        name: of the strategy, with what it adds.
        largest: the largest micro-batch size.
        peak_bytes: at the micro-batch size of all bars.
        kinds: what that peak is made of.
        sample_bytes: what one sample more takes.
        phase: in which that peak is: ``step 2: backward``.
        rank: its place by time, 1 the fastest; None: not known, or it does not fit.
        pace: what the rank is by.
    """

    name: str
    largest: Interval
    peak_bytes: int
    kinds: Mapping[Kind, int]
    sample_bytes: float
    phase: str
    rank: int | None = None
    pace: Pace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan as it is shown.

    Attributes:
        model: what is planned, in words.
        device_name: what it is planned for.
        capacity_bytes: its memory.
        usable_bytes: what of it is there for tensors.
        world_size: ranks.
        rows: the strategies, in the order asked for.
        bar_size: micro-batch size of all bars.
        timeline: of the strategy that is shown; None: there is none.
        advice: what to change about it.
        is_cpu: whether ranks are CPU engines.
        card: whose speeds the ranking is by; empty: there is no ranking.
        notes: sentences a person should read.
        stamp: when it was drawn, as text.
        untraced: why a strategy has no row, by name.
    """

    model: str
    device_name: str
    capacity_bytes: int
    usable_bytes: int
    world_size: int
    rows: Sequence[PlanRow]
    bar_size: int
    timeline: Timeline | None
    advice: Sequence[str]
    is_cpu: bool
    card: str
    notes: Sequence[str]
    stamp: str
    untraced: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> PlanRow | None:
        """The row whose timeline is shown."""
        wanted = self.timeline.strategy if self.timeline else ""
        return next((row for row in self.rows if row.name == wanted), None)


def view_of(plan: MemoryPlan, *, strategy: str | None = None, stamp: str = "") -> PlanView:
    """Return how a plan is shown.

    Args:
        plan: what is shown.
        strategy: whose timeline; None: the recommended one's.
        stamp: the time.
    """
    shown = plan.recommended if strategy is None else plan[strategy].name
    ranking, paces = plan.ranking(), plan.paces()
    bar_size = plan.micro_batch_size or _common_size(plan)
    return PlanView(
        model=plan.model,
        device_name=plan.device.name,
        capacity_bytes=plan.device.capacity_bytes,
        usable_bytes=plan.device.usable_bytes,
        world_size=plan.world_size,
        rows=[_row(plan, name, bar_size, ranking, paces) for name in plan.strategies],
        bar_size=bar_size,
        timeline=plan.timeline(shown),
        advice=[str(each) for each in advice_for(plan, shown)],
        is_cpu=plan.device.kind == "cpu",
        card=plan.device.card.name if plan.device.card and ranking else "",
        notes=[*plan.notes, *_without_bf16(plan)],
        stamp=stamp,
        untraced=plan.untraced,
    )


def _common_size(plan: MemoryPlan) -> int:
    """Return the largest micro-batch size of every strategy that fits at all, so bars compare."""
    found = [each for each in plan.intervals.values() if each.safe and not each.is_open]
    return min((each.safe for each in found), default=1)


def _without_bf16(plan: MemoryPlan) -> list[str]:
    """Return that a card does not compute in bf16, where a strategy does."""
    card = plan.device.card
    if card is None or card.has_bf16:
        return []
    if not any(each.trace.precision == "bf16" for each in plan.strategies.values()):
        return []
    return [f"{card.name} does not compute in bf16, and engines refuse it there: type fp16"]


def _row(
    plan: MemoryPlan,
    name: str,
    bar_size: int,
    ranking: Mapping[str, int],
    paces: Mapping[str, Pace],
) -> PlanRow:
    each = plan[name]
    largest = each.largest(plan.device)
    # The slope where the next sample counts: at the size that is recommended.
    last = max(2, min(largest.safe, 1 << 10))
    return PlanRow(
        name=name,
        largest=largest,
        peak_bytes=each.peak_bytes(bar_size),
        kinds=each.kinds(bar_size),
        sample_bytes=each.peak_bytes(last) - each.peak_bytes(last - 1),
        phase=each.peak_phase(bar_size),
        rank=ranking.get(name),
        pace=paces.get(name),
    )
