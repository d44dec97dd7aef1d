"""Plans: the peak of any size, the largest that fits, timelines, parts, terms, advice."""

from __future__ import annotations

import random
import re

import pytest
from plan_records import device, memory_plan, step_trace, strategy_plan

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.planning.advice import advice_for
from fsdp_magic.core.planning.allocator import reserved_peak
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.peak_curve import MOST_SAMPLES, PeakCurve
from fsdp_magic.core.planning.peak_parts import OWN_FORWARD, grouped
from fsdp_magic.core.planning.step_trace import Allocated, Freed, Reached, Size, TracedModule
from fsdp_magic.core.planning.terms import PEAK, USABLE
from fsdp_magic.core.planning.timeline import KINDS, timeline_of
from fsdp_magic.core.units import GIB, MIB, bytes_text


def _random_ledger(seed: int, entries: int = 400) -> Ledger:
    """Ledgers of even seeds grow with the square of the size too."""
    chance = random.Random(seed)
    ledger, held = Ledger(), []
    for key in range(entries):
        if held and chance.random() < 0.48:
            ledger.give_back(held.pop(chance.randrange(len(held))))
            continue
        size = Size(
            chance.randrange(1000),
            chance.randrange(100),
            (0, 0, 3)[chance.randrange(3)] * (seed % 2 == 0),
        )
        ledger.take(key, size, chance.choice(KINDS))
        held.append(key)
    return ledger


# ---------------------------------------------------------------- peaks and sizes


@pytest.mark.parametrize("seed", range(5))
def test_the_curve_has_the_peak_of_the_ledger_at_every_size(seed: int) -> None:
    ledger = _random_ledger(seed)
    curve = PeakCurve(ledger)
    for size in (1, 2, 3, 7, 50, 4000):
        assert curve.at(size) == pytest.approx(ledger.peak(size))
        assert ledger.levels(size)[curve.entry(size)] == pytest.approx(ledger.peak(size))


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_size_fits_and_the_next_one_does_not(seed: int) -> None:
    ledger = _random_ledger(seed)
    curve = PeakCurve(ledger)
    for capacity in (ledger.peak(1) - 1, ledger.peak(1), ledger.peak(9), 1e9):
        largest = curve.largest(capacity)
        assert largest == 0 or ledger.peak(largest) <= capacity
        assert ledger.peak(largest + 1) > capacity


def test_memory_that_does_not_grow_with_samples_sets_no_end() -> None:
    ledger = Ledger()
    ledger.take("all", 100, "parameter")
    assert PeakCurve(ledger).largest(100) == MOST_SAMPLES
    assert PeakCurve(ledger).largest(99) == 0


def test_the_safe_end_is_at_most_the_ideal_one_and_on_a_cpu_they_are_one() -> None:
    for name in ("ddp", "full_shard"):
        plan = strategy_plan(name)
        on_gpu = plan.largest(device())
        on_cpu = plan.largest(device(kind="cpu"))
        assert 0 < on_gpu.safe <= on_gpu.ideal == on_cpu.ideal == on_cpu.safe
        usable = device().usable_bytes
        assert reserved_peak(plan.ledger, on_gpu.safe, usable) is not None
        assert reserved_peak(plan.ledger, on_gpu.safe + 1, usable) is None


def test_a_plan_is_asked_by_any_name_of_a_strategy() -> None:
    plan = memory_plan()
    assert plan.peak_bytes("FSDP", 3) == plan.strategies["full_shard"].peak_bytes(3)
    assert plan.max_micro_batch_size["full_shard"] > plan.max_micro_batch_size["ddp"] > 0
    with pytest.raises(UsageError, match="'zero1' was not planned; planned: ddp, full_shard"):
        plan.peak_bytes("zero1", 1)


# ---------------------------------------------------------------- timelines and parts


@pytest.mark.parametrize("points", [7, 60, 10_000])
def test_a_thinned_timeline_keeps_the_peak(points: int) -> None:
    ledger = _random_ledger(3)
    timeline = timeline_of(ledger, 5, most_points=points)
    assert len(timeline.points) <= points
    assert timeline.peak_bytes == round(ledger.peak(5))
    assert timeline.points[timeline.peak].total == max(point.total for point in timeline.points)
    levels = ledger.levels(5)
    for point in timeline.points:
        assert point.total == pytest.approx(levels[point.entry])


def test_a_timeline_names_the_phase_of_its_peak() -> None:
    timeline = memory_plan().timeline("full_shard", 8)
    assert timeline.peak_phase == "step 2: backward"
    assert [phase.name for phase in timeline.phases][:3] == [
        *("step 1: forward", "step 1: backward", "step 1: optimizer"),
    ]


def test_the_parts_of_a_peak_add_up_to_it() -> None:
    for size in (1, 8):
        plan = strategy_plan("full_shard")
        assert sum(part.bytes for part in plan.parts(size)) == plan.peak_bytes(size)
        assert sum(plan.kinds(size).values()) == plan.peak_bytes(size)


def test_what_the_model_repeats_is_one_part_and_the_head_is_with_the_loss() -> None:
    parts = {(part.kind, part.place): part.bytes for part in strategy_plan("ddp").parts(8)}
    assert parts["activation", "blocks.*.mlp"] == 4 * 8 * 2 * MIB
    assert parts["activation", "head and loss"] == 8 * 8 * MIB + 4
    assert parts["temporary", "head and loss"] == 8 * 8 * MIB


@pytest.mark.parametrize(
    ("place", "group"),
    [
        ("transformer.h.12.attn.c_attn", "transformer.h.*.attn"),
        ("transformer.h.12", "transformer.h.*"),
        ("layer1.0.conv2", "layer1.*.conv2"),
        ("encoder.embeddings.word", "encoder.embeddings.word"),
        ("0", "*"),
    ],
)
def test_places_are_grouped(place: str, group: str) -> None:
    assert grouped(place) == group


def test_terms_add_up_and_each_has_a_source() -> None:
    plan = memory_plan("full_shard", device=device(context_bytes=MIB))
    terms = plan.terms("full_shard", 4)
    assert all(term.source for term in terms)
    names = [term.name for term in terms]
    usable, peak = names.index(USABLE), names.index(PEAK)
    assert sum(term.bytes for term in terms[:usable]) == terms[usable].bytes == 255 * MIB
    assert sum(term.bytes for term in terms[usable + 1 : peak]) == terms[peak].bytes
    assert terms[peak].bytes == plan.peak_bytes("full_shard", 4)
    assert terms[-1].bytes > 0
    assert re.search(rf"{PEAK} +{terms[peak].bytes / GIB:.3f} GiB  the sum", repr(terms))


# ---------------------------------------------------------------- what to change


def test_advice_on_what_every_rank_holds_has_the_figures_of_the_other_strategy() -> None:
    plan = memory_plan("ddp", micro_batch_size=2)
    first, *_ = advice_for(plan, "ddp")
    sharded = strategy_plan("full_shard")
    held = plan["ddp"].kinds(2)
    assert first.bytes == held["parameter"] + held["gradient"] + held["optimizer"]
    assert bytes_text(sharded.peak_bytes(2)) in first.change
    assert f"up to {sharded.largest(device()).safe} samples fit" in first.change


def test_advice_on_activations_has_the_share_and_what_checkpointing_leaves() -> None:
    plan = memory_plan("full_shard", micro_batch_size=16)
    blocks = next(a for a in advice_for(plan, "full_shard") if "blocks" in a.part)
    assert blocks.bytes == 16 * 4 * 2 * MIB
    assert f"{blocks.bytes / plan.peak_bytes('full_shard', 16):.0%}".rstrip("%") in blocks.part
    assert f"one of 4 blocks at a time, {bytes_text(blocks.bytes / 4)}" in blocks.change


def test_advice_on_activations_takes_the_figures_of_a_variant_that_was_planned() -> None:
    plan = memory_plan("full_shard", micro_batch_size=16)
    fewer = {"micro_step": step_trace().micro_step[:8], "activation_checkpointing": "blocks"}
    variant = strategy_plan("full_shard", **fewer)
    both = {**plan.strategies, "full_shard+activation_checkpointing": variant}
    plan = memory_plan(strategies=both, micro_batch_size=16)
    blocks = next(a for a in advice_for(plan, "full_shard") if "blocks" in a.part)
    assert bytes_text(variant.peak_bytes(16)) in blocks.change


def test_advice_on_the_loss_names_the_classes() -> None:
    plan = memory_plan("full_shard", micro_batch_size=16)
    loss = next(a for a in advice_for(plan, "full_shard") if "loss" in a.part)
    assert loss.bytes == pytest.approx(2 * 16 * 8 * MIB, abs=4)
    assert "4,096 classes" in loss.change
    assert "16.0 MiB a sample" in loss.change


def test_advice_on_the_loss_speaks_of_positions_only_where_samples_are_tokens() -> None:
    modules = step_trace().modules
    text = {**modules, "ids": TracedModule(class_name="Embedding")}
    for traced, has_positions in ((modules, False), (text, True)):
        plans = {"full_shard": strategy_plan("full_shard", modules=traced)}
        plan = memory_plan(strategies=plans, micro_batch_size=16)
        loss = next(a for a in advice_for(plan, "full_shard") if "loss" in a.part)
        assert ("--seq-len" in loss.change) is has_positions
        assert ("position" in loss.change) is has_positions


def test_what_the_models_own_forward_keeps_is_not_of_the_loss() -> None:
    trace = step_trace()
    residual = Allocated(900, Size(0, MIB), "activation", "", "add")
    after = Allocated(901, Size(0, 3 * MIB), "activation", "", "log_softmax")
    events = list(trace.micro_step)
    head = events.index(Reached("forward", "head"))
    backward = events.index(Reached("backward"))
    events[backward:backward] = [after]
    events[head:head] = [residual]
    events[-1:-1] = [Freed(900), Freed(901)]
    plan = strategy_plan("full_shard", micro_step=tuple(events))
    parts = {part.place: part.bytes for part in plan.parts(16) if part.kind == "activation"}
    assert parts[OWN_FORWARD] == 16 * MIB
    assert parts["head and loss"] == pytest.approx((8 + 3) * 16 * MIB, abs=4)


def test_advice_names_strategies_as_the_table_does_and_the_largest_size_that_is_tried() -> None:
    first, *_ = advice_for(memory_plan("ddp", device=device(capacity_bytes=1 << 50)), "ddp")
    assert first.change.startswith("full_shard leaves a peak of ")
    assert first.change.endswith("; at least 1,048,576 samples fit")
    advice = advice_for(memory_plan("shard_grad_op", micro_batch_size=1), "shard_grad_op")
    assert any(each.change.startswith("shard_grad_op+cpu_offload leaves ") for each in advice)


def test_one_unit_of_all_blocks_gets_no_advice_to_checkpoint_it() -> None:
    units = {**step_trace().units, "none": (("",),)}
    plan = strategy_plan("full_shard", units=units)
    whole = {"full_shard": plan.changed(wrap="none")}
    for strategies, is_advised in (({"full_shard": plan}, True), (whole, False)):
        advice = advice_for(memory_plan(strategies=strategies, micro_batch_size=16), "full_shard")
        assert any("checkpointing" in each.change for each in advice) is is_advised


def test_parts_that_take_little_get_no_advice() -> None:
    plan = memory_plan("ddp", micro_batch_size=500)
    assert not [a for a in advice_for(plan, "ddp") if "optimizer" in a.part]
