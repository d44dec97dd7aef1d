"""What a strategy takes on a rank, against ledgers that are added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_magic.core.planning.gradient_buckets import BUCKET_BYTES, buckets_of
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.overlay import BATCHES, Setting, replay
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Event,
    Freed,
    OptimizerAllocated,
    OptimizerTrace,
    Reached,
    Size,
    StepTrace,
    TracedModule,
    TracedParameter,
)
from fsdp_magic.core.planning.strategies import ledger_of, overlay_of
from fsdp_magic.engine.parallel import gradient_buckets as of_engines

LAYERS, ELEMENTS = 16, 1_000_000
WHOLE = LAYERS * ELEMENTS
UNIT = 4 * ELEMENTS
"""Bytes of one layer in fp32."""


def stack(
    *, layers: int = LAYERS, low: bool = False, saved: float = 0.0, frozen: tuple[int, ...] = ()
) -> StepTrace:
    """Return the trace of a stack of layers with one weight each, trained by AdamW.

    Args:
        layers: how many.
        low: whether it computes in bf16.
        saved: bytes a sample that each layer keeps for backward.
        frozen: numbers of the layers that are not trained.
    """
    parameters = {
        f"layers.{n}.weight": TracedParameter(
            name=f"layers.{n}.weight",
            shape=(1000, 1000),
            compute_bytes=2 if low else 4,
            trained=n not in frozen,
        )
        for n in range(layers)
    }
    modules = {"": TracedModule(class_name="Stack")} | {
        f"layers.{n}": TracedModule(class_name="Linear", parameters=(f"layers.{n}.weight",))
        for n in range(layers)
    }
    trained = [name for name, p in parameters.items() if p.trained]
    state = tuple(OptimizerAllocated(n, p, 8, 0, "optimizer") for n, p in enumerate(trained))
    return StepTrace(
        parameters=parameters,
        modules=modules,
        micro_step=tuple(_micro_step(layers, saved, set(trained))),
        optimizer=OptimizerTrace(name="AdamW", first=state, later=()),
        units={"blocks": tuple((f"layers.{n}",) for n in range(layers)), "none": ()},
        precision="bf16" if low else "fp32",
    )


def _micro_step(layers: int, saved: float, trained: set[str]) -> list[Event]:
    events: list[Event] = [Reached("forward")]
    for n in range(layers):
        events += [
            Reached("forward", f"layers.{n}"),
            Allocated(n, Size(0.0, saved), "activation", f"layers.{n}", "aten::mm"),
            Reached("forward_end", f"layers.{n}"),
        ]
    events += [Reached("forward_end"), Reached("backward"), Reached("module_backward")]
    for n in reversed(range(layers)):
        events.append(Reached("module_backward", f"layers.{n}"))
        if f"layers.{n}.weight" in trained:
            events.append(Reached("gradient", f"layers.{n}.weight"))
        events += [Freed(n), Reached("inputs_backward", f"layers.{n}")]
    return [*events, Reached("micro_step_end")]


def peak(trace: StepTrace, micro_batch_size: int = 1, **options: object) -> float:
    return ledger_of(trace, Setting(**options)).peak(micro_batch_size)  # type: ignore[arg-type]


def terms(ledger: Ledger) -> set[str]:
    return {entry.term for entry in ledger.entries}


@pytest.mark.parametrize("ranks", [2, 4, 8, 1000])
def test_a_parameter_takes_what_theory_says_at_the_peak(ranks: int) -> None:
    # the second micro-step has the gradients of the first, as the formulas have it
    options = {"world_size": ranks, "accumulate": 2}
    theory = {
        # three buckets of two layers each: two under way, and one more that waits for them
        "ddp": (16.0, 6),
        "zero1": (8 + 8 / ranks, 6),
        # gathered into a buffer; then a gradient and its two buffers, while the next is gathered
        "shard_grad_op": (4 + 16 / ranks, 3),
        "full_shard": (16 / ranks, 4 + 1 / ranks),
    }
    for strategy, (bytes_, units) in theory.items():
        found = peak(stack(), strategy=strategy, **options)
        assert bytes_ * WHOLE <= found <= bytes_ * WHOLE + units * UNIT, strategy


def test_batches_of_all_micro_steps_are_there_at_once() -> None:
    """A step reads them as it begins, while those of the step before are still there."""
    plain, sample = stack(saved=10.0), 3_000.0
    batch = Allocated(10_000, Size(0.0, sample), "input", "", "")
    trace = replace(plain, micro_step=(batch, *plain.micro_step, Freed(10_000, carried=True)))
    for accumulate in (1, 4, 64):
        setting = Setting(accumulate=accumulate)
        ledger, without = ledger_of(trace, setting), ledger_of(plain, setting)
        assert ledger.peak(2) == without.peak(2) + 2 * accumulate * sample
        begins = next(p.entry for p in ledger.phases if p.name == "step 2: forward")
        held = [e.size.at(2) for e in ledger.live_after(begins) if e.kind == "input"]
        assert sum(held) == 2 * accumulate * sample
    assert BATCHES in terms(ledger)


def test_full_shard_holds_two_units_a_gradient_and_its_buffers() -> None:
    shards, state = WHOLE * 4 / 2, WHOLE * 8 / 2
    # backward, in the middle: two units gathered, the next one's buffer, the last reduction's
    # input, the new one's; the gradient of one goes as its buffer is filled
    ledger = ledger_of(stack(), Setting(world_size=2))
    held = {"gathered": 0.0, "communication": 0.0, "gradient": 0.0}
    for entry in ledger.live_after(ledger.peak_entry(1)):
        if entry.kind in held:
            held[entry.kind] += entry.size.fixed
    assert held["gathered"] <= 2 * UNIT
    assert ledger.peak(1) == shards + state + sum(held.values())


def test_gloo_reduces_a_copy_and_nccl_does_not() -> None:
    nccl = ledger_of(stack(), Setting(world_size=2))
    gloo = ledger_of(stack(), Setting(world_size=2, backend="gloo"))
    copies = {"gloo's all-gather copy", "gloo's reduce-scatter copy"}
    assert copies <= terms(gloo)
    assert not copies & terms(nccl)
    assert [e for e in gloo.entries if e.term not in copies] == nccl.entries
    assert {e.size.fixed for e in gloo.entries if e.term in copies} == {UNIT}


def test_shard_grad_op_keeps_what_it_gathers_until_backward() -> None:
    kept = ledger_of(stack(), Setting(strategy="shard_grad_op"))
    freed = ledger_of(stack(), Setting(strategy="full_shard"))

    def gathered(ledger: Ledger) -> int:
        levels, most = 0, 0
        for entry in ledger.entries:
            if entry.kind == "gathered":
                levels += round(entry.size.fixed) * (1 if entry.taken else -1)
                most = max(most, levels)
        return most

    assert gathered(kept) == LAYERS * UNIT
    assert gathered(freed) == UNIT  # the next one's is in its buffer until it is its turn


def test_low_precision_gathers_half_and_reduces_in_fp32() -> None:
    ledger = ledger_of(stack(low=True), Setting(world_size=2))
    sizes = {e.term: e.size.fixed for e in ledger.entries if e.taken}
    assert sizes["gathered"] == UNIT / 2
    assert sizes["cast of shards"] == UNIT / 4
    assert sizes["all-gather buffer"] == UNIT / 2
    assert sizes["reduce-scatter input"] == UNIT
    assert sizes["gradient"] == UNIT / 2  # of the shard, in fp32


def test_gradients_kept_whole_until_the_last_micro_step_take_four_bytes_a_parameter() -> None:
    every = peak(stack(), accumulate=4, accumulate_sync="every")
    last = peak(stack(), accumulate=4, accumulate_sync="last")
    assert last - every == pytest.approx(4 * WHOLE - 4 * WHOLE / 2, abs=3 * UNIT)
    low = ledger_of(stack(low=True), Setting(accumulate=2, accumulate_sync="last"))
    kept = {e.size.fixed for e in low.entries if e.term == "accumulated gradient"}
    assert kept == {UNIT}  # in fp32


@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "shard_grad_op", "full_shard"])
def test_three_micro_steps_have_the_peak_of_any_number(strategy: str, sync: str) -> None:
    setting = Setting(strategy=strategy, accumulate=5, accumulate_sync=sync)  # type: ignore[arg-type]
    trace = stack(layers=4, saved=1e6, low=True)
    short = replay(overlay_of(trace, setting))
    whole = replay(overlay_of(trace, setting), most_micro_steps=5, steps=3)
    assert len(whole.entries) > len(short.entries)
    for samples in (1, 7, 100):
        assert short.peak(samples) == whole.peak(samples)


def test_frozen_layers_are_gathered_and_have_neither_gradient_nor_state() -> None:
    trace = stack(layers=4, frozen=(0, 1))
    ledger = ledger_of(trace, Setting(world_size=2))
    taken = [e for e in ledger.entries if e.taken]
    assert {e.place for e in taken if e.term == "gathered"} == {f"layers.{n}" for n in range(4)}
    assert sum(e.size.fixed for e in taken if e.kind == "optimizer") == 2 * ELEMENTS * 8 / 2
    # gradients of two layers, in each of two steps
    assert sum(e.term == "gradient" for e in taken) == 4


def test_hybrid_shard_cuts_within_its_group() -> None:
    hybrid = peak(stack(), strategy="hybrid_shard", shard_size=4, world_size=32)
    assert hybrid == peak(stack(), strategy="full_shard", world_size=4)


def test_hybrid_shard_keeps_what_it_has_reduced_between_copies_until_backward_ends() -> None:
    options = {"shard_size": 2, "world_size": 2, "accumulate": 2}
    hybrid = peak(stack(), strategy="hybrid_shard", **options)
    assert hybrid == pytest.approx(
        peak(stack(), strategy="full_shard", **options) + 4 * WHOLE / 2, abs=2 * UNIT
    )


def test_offloaded_shards_take_nothing_on_the_device_between_units() -> None:
    ledger = ledger_of(stack(), Setting(world_size=2, cpu_offload=True))
    resting = [e for e in ledger.entries if e.kind in ("parameter", "optimizer") and e.size.fixed]
    assert not resting
    assert "shards from the host" in terms(ledger)
    assert ledger.levels(1)[-1] == 0


def test_one_rank_gathers_copies_without_buffers() -> None:
    ledger = ledger_of(stack(), Setting(world_size=1))
    assert not {"all-gather buffer", "gloo's reduce-scatter copy"} & terms(ledger)
    assert "gradients divided" in terms(ledger)
    assert ledger.peak(1) >= 16 * WHOLE


def test_rows_that_do_not_divide_are_padded() -> None:
    p = TracedParameter(name="p", shape=(5, 3))
    assert p.local_elements(2) == 9
    assert p.local_elements(4) == 6
    assert p.local_elements(64) == 3
    assert TracedParameter(name="p", shape=()).local_elements(4) == 1
    assert TracedParameter(name="p", shape=(8,), whole=True).local_elements(4) == 8


def test_later_steps_reduce_while_backward_runs_and_the_first_after_it() -> None:
    ledger = ledger_of(stack(), Setting(strategy="ddp"))
    phases = {
        ledger.phase_of(n)
        for n, entry in enumerate(ledger.entries)
        if entry.taken and entry.term == "bucket of gradients"
    }
    assert {"step 1: reduction", "step 2: backward"} <= phases
    assert "step 1: backward" not in phases


def test_zero1_gathers_rows_after_the_optimizer() -> None:
    ledger = ledger_of(stack(), Setting(strategy="zero1", backend="gloo"))
    gathered = [e for e in ledger.entries if e.term == "rows gathered together" and e.taken]
    # two layers of 4 MB fill a bucket of 4 MiB
    assert {e.size.fixed for e in gathered} == {2 * UNIT}
    copies = [e for e in ledger.entries if e.term == "gloo's all-gather copy" and e.taken]
    assert len(copies) == len(gathered)


def test_buckets_are_those_of_the_engines() -> None:
    assert BUCKET_BYTES == of_engines.BUCKET_BYTES
    sizes = [10, 600_000, 2_000_000, 500_000, 900_000, 3, 1_048_576, 70]
    parameters = [
        TracedParameter(name=str(n), shape=(size,), element_bytes=(4, 2, 4)[n % 3])
        for n, size in enumerate(sizes)
    ]

    class Whole:
        def __init__(self, p: TracedParameter) -> None:
            self.name, self.nbytes, self.dtype = p.name, p.bytes, p.element_bytes

    engines = of_engines.buckets_of([Whole(p) for p in parameters])  # type: ignore[misc]
    ours = buckets_of(parameters)
    assert [[p.name for p in bucket] for bucket in ours] == [
        [p.name for p in bucket] for bucket in engines
    ]


def test_a_step_ends_with_what_is_kept() -> None:
    for strategy in ("ddp", "zero1", "shard_grad_op", "full_shard"):
        ledger = ledger_of(stack(layers=4, saved=10.0), Setting(strategy=strategy, world_size=2))  # type: ignore[arg-type]
        kinds = {entry.kind for entry in ledger.live_after(len(ledger.entries) - 1)}
        assert kinds == {"parameter", "optimizer"}, strategy
