"""What to change so that more fits, from what a peak is made of; pure.

Every sentence names a part of the peak, its share, and what a change would leave of it, worked
out: another strategy is replayed for the same step, the rest follows from the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_magic.core.planning.device import Device
from fsdp_magic.core.planning.memory_plan import MemoryPlan, StrategyPlan
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.peak_curve import MOST_SAMPLES
from fsdp_magic.core.planning.peak_parts import OPTIMIZER, PeakPart, is_block, loss_place
from fsdp_magic.core.planning.step_trace import OptimizerAllocated, StepTrace
from fsdp_magic.core.specs.strategy import OFFLOADED
from fsdp_magic.core.units import bytes_text

_WORTH_SAYING = 0.08
"""Parts below this share of the peak are not worth a change."""
_MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A part of the peak, and what would leave less of it.

    Attributes:
        bytes: of the part.
        part: what it is, with its share: ``activations of blocks are 61 % of the peak (9 GiB)``.
        change: what to do, and what that leaves.
    """

    bytes: int
    part: str
    change: str

    def __str__(self) -> str:
        return f"{self.part}: {self.change}" if self.change else self.part


def advice_for(plan: MemoryPlan, strategy: str) -> tuple[Advice, ...]:
    """Return what to change about a strategy at the size at which it is shown.

    The parts that take most come first.
    """
    case = _Case(plan[strategy], plan.device, plan.shown_size(strategy))
    found = [
        *_of_states(case),
        *_of_blocks(case, plan),
        *_of_the_loss(case),
        *_of_the_optimizer(case),
        *_of_units(case),
    ]
    worth = [each for each in found if each.bytes >= _WORTH_SAYING * case.peak]
    return tuple(sorted(worth, key=lambda each: -each.bytes)[:_MOST])


class _Case:
    """A strategy at a micro-batch size, and what its peak is made of."""

    def __init__(self, plan: StrategyPlan, device: Device, micro_batch_size: int) -> None:
        self.plan = plan
        self.device = device
        self.size = micro_batch_size
        self.peak = plan.peak_bytes(micro_batch_size)
        self.parts = plan.parts(micro_batch_size)
        self.phase = plan.peak_phase(micro_batch_size)

    def total(self, parts: Sequence[PeakPart]) -> int:
        return sum(part.bytes for part in parts)

    def share(self, size: int) -> str:
        return f"{size / self.peak:.0%} of the peak ({bytes_text(size)})".replace("%", " %")

    def of(self, *kinds: str) -> list[PeakPart]:
        return [part for part in self.parts if part.kind in kinds]


# ---------------------------------------------------------------- parameters, gradients, states


def _of_states(case: _Case) -> Iterator[Advice]:
    """Advise on what every rank holds of the model, its gradients and the optimizer's state."""
    size = case.total(case.of("parameter", "gradient", "optimizer"))
    part = f"parameters, gradients and optimizer state are {case.share(size)}"
    if case.plan.setting.world_size > 1 and not _is_sharded(case.plan.setting):
        other = case.plan.changed(strategy="full_shard", shard_size=None)
        yield Advice(bytes=size, part=part, change=f"full_shard {_leaves(case, other)}")
        return
    offloads = case.plan.setting.strategy in OFFLOADED and case.device.kind == "cuda"
    if offloads and not case.plan.setting.cpu_offload:
        other = case.plan.changed(cpu_offload=True)
        name = f"{case.plan.name}+cpu_offload"
        yield Advice(bytes=size, part=part, change=f"{name} {_leaves(case, other)}")
        return
    world = 2 * case.plan.setting.world_size
    if case.plan.setting.strategy == "full_shard" and not case.plan.setting.cpu_offload:
        other = case.plan.changed(world_size=world)
        yield Advice(bytes=size, part=part, change=f"{world} ranks {_leaves(case, other, 'leave')}")


def _is_sharded(setting: Setting) -> bool:
    return setting.strategy in ("full_shard", "shard_grad_op")


def _leaves(case: _Case, other: StrategyPlan, verb: str = "leaves") -> str:
    """Return what another way to spread the same step comes to."""
    peak, largest = other.peak_bytes(case.size), other.largest(case.device)
    samples = f"{largest.safe:,} sample{'s' if largest.safe != 1 else ''}"
    fits = f"up to {samples} fit" if largest.safe else "not even one sample fits"
    if largest.is_open:
        fits = f"at least {MOST_SAMPLES:,} samples fit"
    return f"{verb} a peak of {bytes_text(peak)}; {fits}"


# ---------------------------------------------------------------- activations


def _of_blocks(case: _Case, plan: MemoryPlan) -> Iterator[Advice]:
    """Advise on what forward keeps of modules that the model repeats."""
    held = [part for part in case.of("activation") if is_block(part.place)]
    size = case.total(held)
    trace = case.plan.trace
    if trace.activation_checkpointing or not size:
        return
    part = f"activations of the model's blocks are {case.share(size)}"
    other = _checkpointed(case.plan, plan)
    if other is not None:
        yield Advice(bytes=size, part=part, change=f"{other.name} {_leaves(case, other)}")
        return
    blocks = _blocks(case)
    if blocks < 2:
        return
    yield Advice(
        bytes=size,
        part=part,
        change=f"{case.plan.name}+activation_checkpointing keeps those of one of {blocks} "
        f"blocks at a time, {bytes_text(size / blocks)}, and the input of each",
    )


def _checkpointed(one: StrategyPlan, plan: MemoryPlan) -> StrategyPlan | None:
    """Return the strategy that was planned and differs by activation checkpointing alone."""
    return next(
        (
            other
            for other in plan.strategies.values()
            if other.setting == one.setting
            and other.trace.precision == one.trace.precision
            and other.trace.activation_checkpointing
        ),
        None,
    )


def _blocks(case: _Case) -> int:
    """Return how many units the model's blocks are."""
    units = case.plan.trace.units.get(case.plan.setting.wrap, ())
    return sum(is_block(_starred(heads[0])) for heads in units)


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _of_the_loss(case: _Case) -> Iterator[Advice]:
    """Advise on the scores of every class and the loss over them."""
    place = loss_place(case.plan.trace)
    size = case.total([part for part in case.of("activation", "temporary") if part.place == place])
    classes = _classes(case, place)
    per_sample = size / case.size
    positions, less = "", "smaller samples, or a loss over parts of them, take less"
    if _takes_tokens(case.plan.trace):
        positions = " for every position"
        less = "half of --seq-len, or a loss over parts of the positions, takes half of it"
    yield Advice(
        bytes=size,
        part=f"{place} are {case.share(size)}",
        change=f"scores of {classes}{positions}, {bytes_text(per_sample)} a sample; {less}",
    )


def _takes_tokens(trace: StepTrace) -> bool:
    """Return whether samples are sequences of tokens, which have a length."""
    return any("Embedding" in module.class_name for module in trace.modules.values())


def _classes(case: _Case, place: str) -> str:
    """Return how many classes the last module tells apart, in words."""
    head = case.plan.trace.modules.get(place.removesuffix(" and loss"))
    names = head.parameters if head else ()
    rows = [case.plan.trace.parameters[name].shape[0] for name in names if name.endswith("weight")]
    return f"{rows[0]:,} classes" if rows else "all classes"


# ---------------------------------------------------------------- optimizer and units


def _of_the_optimizer(case: _Case) -> Iterator[Advice]:
    """Advise on what the optimizer needs for a moment."""
    size = case.total([part for part in case.of("temporary") if part.place == OPTIMIZER])
    largest = max(_optimizer_temporaries(case), default=0.0)
    yield Advice(
        bytes=size,
        part=f"what the optimizer needs for a moment is {case.share(size)}",
        change="foreach=False in the optimizer takes it a parameter at a time, at most "
        f"{bytes_text(largest)}",
    )


def _optimizer_temporaries(case: _Case) -> Iterator[float]:
    """Yield the bytes of each temporary of the optimizer on this rank."""
    elements = case.plan.optimizer_elements()
    for event in case.plan.trace.optimizer.later:
        if isinstance(event, OptimizerAllocated) and event.kind == "temporary":
            yield event.fixed + event.per_element * elements.get(event.parameter, 0)


def _of_units(case: _Case) -> Iterator[Advice]:
    """Advise on what is gathered."""
    size = case.total(case.of("gathered"))
    setting = case.plan.setting
    if setting.strategy == "shard_grad_op":
        other = case.plan.changed(strategy="full_shard", shard_size=None)
        change = f"full_shard frees them after use: it {_leaves(case, other)}"
        yield Advice(bytes=size, part=f"gathered parameters are {case.share(size)}", change=change)
        return
    elements = sum(p.elements for p in case.plan.trace.parameters.values())
    smaller = 10 ** max(5, round(math.log10(max(1, elements / 100))))
    yield Advice(
        bytes=size,
        part=f"gathered parameters are {case.share(size)}",
        change=f"smaller units hold less at a time: --wrap size:{smaller}",
    )
