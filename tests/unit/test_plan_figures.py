"""Figures of a plan that are worked out by hand: paces, terms, parts, and what advice leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_records import device, memory_plan, step_trace, strategy_plan

from fsdp_magic.core.planning.advice import Advice, advice_for
from fsdp_magic.core.planning.allocator import reserved_peak
from fsdp_magic.core.planning.cards import Card
from fsdp_magic.core.planning.ledger import Ledger, Phase, phase_at
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.peak_curve import PeakCurve
from fsdp_magic.core.planning.peak_parts import OPTIMIZER
from fsdp_magic.core.planning.roofline import pace_of
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Freed,
    OptimizerAllocated,
    OptimizerTrace,
    Size,
    TracedParameter,
)
from fsdp_magic.core.units import MIB, bytes_text

ELEMENTS = 5 * 2**20
CARD = Card(
    name="made up",
    memory_gib=1,
    memory_source="",
    fp32_tflops=1,
    half_tflops=10,
    memory_gb_per_second=100,
    link_gb_per_second=10,
    host_gb_per_second=5,
    data_sheet="",
)


def advice(strategy: str, about: str, **changes: object) -> Advice:
    plan = memory_plan(strategy, **{"micro_batch_size": 2, **changes})  # type: ignore[arg-type]
    return next(each for each in advice_for(plan, strategy) if about in each.part)


def pace(trace_changes: dict[str, object], **options: object) -> float:
    setting = Setting(world_size=2, accumulate=3, **options)  # type: ignore[arg-type]
    found = pace_of(step_trace(**trace_changes), setting, CARD, micro_batch_size=4)
    assert found is not None
    return found.seconds_per_sample * 12


# ---------------------------------------------------------------- speed


def test_a_step_computes_or_moves_memory_and_then_sends() -> None:
    link = 0.5 * (3 * 2 * 4 + 3 * 4) * ELEMENTS / 10e9
    memory = (3 * (1e9 + 4e8) + 7 * 4 * ELEMENTS / 2) / 100e9
    assert pace({}) == pytest.approx(12 + link)
    assert pace({"precision": "bf16"}) == pytest.approx(1.2 + link)
    assert pace({"flops": Size(0, 1e9)}) == pytest.approx(memory + link)
    whole = pace({"flops": Size(0, 1e9)}, strategy="ddp")
    sent = 0.5 * 2 * 4 * ELEMENTS / 10e9
    assert whole == pytest.approx((3 * 1.4e9 + 7 * 4 * ELEMENTS) / 100e9 + sent)


def test_offloaded_shards_pass_the_link_to_the_host() -> None:
    link = 0.5 * (3 * 2 * 4 + 3 * 4) * ELEMENTS / 10e9
    host = 3 * 2 * 4 * ELEMENTS / 2 / 5e9
    assert pace({"flops": Size(0, 1e9)}, cpu_offload=True) == pytest.approx(0.042 + link + host)


# ---------------------------------------------------------------- phases, terms and parts


def test_a_phase_begins_with_its_first_entry() -> None:
    phases = (Phase(1, "forward"), Phase(3, "backward"))
    assert [phase_at(phases, entry) for entry in range(4)] == [
        *("the model", "forward", "forward", "backward"),
    ]
    ledger = Ledger()
    ledger.take(("a",), 1, "input")
    ledger.enter("forward")
    ledger.take(("b",), 1, "input")
    assert (ledger.phase_of(0), ledger.phase_of(1)) == ("the model", "forward")


def test_a_timeline_is_of_the_size_asked_for() -> None:
    plan = memory_plan()
    for size in (1, 3):
        assert plan.timeline("ddp", size).peak_bytes == plan.peak_bytes("ddp", size)
        assert plan.timeline("ddp", size).micro_batch_size == size


def test_terms_say_what_is_outside_and_what_the_allocator_adds() -> None:
    outside = device(context_bytes=MIB, communication_bytes=2 * MIB)
    terms = {t.name: t.bytes for t in memory_plan("full_shard", device=outside).terms(None, 4)}
    assert terms["usable by tensors"] == sum(
        terms[name] for name in ("capacity", "CUDA context, libraries, kernels", "NCCL's channels")
    )
    plan = strategy_plan("full_shard")
    reserved = reserved_peak(plan.ledger, 4, outside.usable_bytes)
    assert terms["reserved beyond it"] == (reserved or 0) - plan.peak_bytes(4)


def test_the_safe_end_is_what_is_recommended_and_shown() -> None:
    tight = next(
        d
        for d in (device(capacity_bytes=n * MIB) for n in range(150, 400, 7))
        if (found := strategy_plan("full_shard").largest(d)).safe < found.ideal
    )
    plan, safe = memory_plan("ddp", "full_shard", device=tight), {}
    for name in ("ddp", "full_shard"):
        safe[name] = plan[name].largest(tight).safe
        assert plan.shown_size(name) == max(1, safe[name])
    assert plan.max_micro_batch_size == safe
    said = next(a for a in advice_for(plan, "ddp") if "state" in a.part).change
    assert f"up to {safe['full_shard']} samples fit" in said


def _with_large_moments(name: str) -> OptimizerTrace:
    """Return an optimizer of two moments, of which the first takes ten times the second."""
    made = [OptimizerAllocated(0, name, 40, 0, "temporary"), Freed(0)]
    made += [OptimizerAllocated(1, "head.weight", 4, 0, "temporary"), Freed(1)]
    return OptimizerTrace(name="own", first=tuple(made), later=tuple(made))


def test_what_an_optimizer_needs_for_a_moment_is_a_part_with_advice() -> None:
    trace = {"optimizer": _with_large_moments("blocks.0.weight")}
    plan = strategy_plan("ddp", **trace)
    parts = {(part.kind, part.place): part.bytes for part in plan.parts(1)}
    assert parts["temporary", OPTIMIZER] == 40 * MIB
    found = advice("ddp", "the optimizer needs", strategies={"ddp": plan}, micro_batch_size=1)
    assert found.bytes == 40 * MIB
    assert "at most 40.0 MiB" in found.change


def test_what_collectives_need_is_told_by_what_it_is_for() -> None:
    places = {part.place for part in strategy_plan("full_shard").parts(1) if part.bytes}
    assert "all-gather buffer" in places


def test_small_parts_are_parts() -> None:
    batch = Allocated(50, Size(0, 10), "input", "", "")
    plan = strategy_plan("ddp", micro_step=(batch, *step_trace().micro_step, Freed(50)))
    assert {part.kind: part.bytes for part in plan.parts(8)}["input"] == 80


def test_a_curve_turns_where_another_level_is_higher() -> None:
    lines = [(100, 1), (60, 10), (0, 30)]
    ledger = Ledger()
    for number, line in enumerate(lines):
        ledger.take((number,), Size(*line), "activation")
        ledger.give_back((number,))
    for size in (1, 4, 5, 40):
        assert PeakCurve(ledger).at(size) == max(a + b * size for a, b in lines)


# ---------------------------------------------------------------- what to change


def test_advice_has_the_figures_of_what_it_advises() -> None:
    offloaded = strategy_plan("full_shard+cpu_offload").peak_bytes(2)
    assert f"full_shard+cpu_offload leaves a peak of {bytes_text(offloaded)}" in (
        advice("full_shard", "optimizer state").change
    )
    four = strategy_plan("full_shard", world_size=4).peak_bytes(2)
    on_cpu = advice("full_shard", "optimizer state", device=device(kind="cpu"))
    assert f"4 ranks leave a peak of {bytes_text(four)}" in on_cpu.change
    freed = strategy_plan("full_shard").peak_bytes(2)
    assert f"it leaves a peak of {bytes_text(freed)}" in (
        advice("shard_grad_op", "gathered parameters").change
    )


def test_advice_on_units_is_a_hundredth_of_the_model() -> None:
    trace = step_trace()
    large = replace(trace.parameters["head.weight"], shape=(4096, 250_000))
    assert isinstance(large, TracedParameter)
    plan = strategy_plan("full_shard", parameters={**trace.parameters, "head.weight": large})
    found = advice("full_shard", "gathered parameters", strategies={"full_shard": plan})
    assert found.change.endswith("--wrap size:10000000")


def test_what_takes_most_is_advised_on_first() -> None:
    sizes = [each.bytes for each in advice_for(memory_plan(micro_batch_size=8), "ddp")]
    assert len(sizes) > 1
    assert sizes == sorted(sizes, reverse=True)
