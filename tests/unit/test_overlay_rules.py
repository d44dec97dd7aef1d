"""Each rule of an overlay by itself, on a trace that has just what the rule is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from fsdp_magic.core.planning.ledger import Entry, Ledger
from fsdp_magic.core.planning.overlay import Setting
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
from fsdp_magic.core.planning.strategies import ledger_of
from fsdp_magic.core.units import MIB

NOTHING = OptimizerTrace(name="SGD", first=(), later=())


def weight(name: str, *shape: int, **changes: object) -> TracedParameter:
    return TracedParameter(name=f"{name}.weight", shape=shape or (4, 4), **changes)  # type: ignore[arg-type]


def model_of(*parameters: TracedParameter, **changes: object) -> StepTrace:
    """Return the trace of modules with one parameter each, which follow each other."""
    names = [p.name.removesuffix(".weight") for p in parameters]
    own = dict(zip(names, parameters, strict=True))
    modules = {"": TracedModule(class_name="Model")} | {
        name: TracedModule(class_name="Block", parameters=(p.name,)) for name, p in own.items()
    }
    heads = [name for name in names if name]
    events = [Reached("forward"), *_forward(heads), Reached("forward_end"), Reached("backward")]
    events += [Reached("module_backward"), *_backward(heads, own)]
    if "" in own:
        events.append(Reached("gradient", own[""].name))
    values = {
        "parameters": {p.name: p for p in parameters},
        "modules": modules,
        "micro_step": (*events, Reached("micro_step_end")),
        "optimizer": NOTHING,
        "units": {"blocks": tuple((name,) for name in heads)},
    }
    return StepTrace(**(values | changes))  # type: ignore[arg-type]


def _forward(names: Iterable[str]) -> Iterator[Event]:
    for name in names:
        yield from (Reached("forward", name), Reached("forward_end", name))


def _backward(names: list[str], own: dict[str, TracedParameter]) -> Iterator[Event]:
    for name in reversed(names):
        yield Reached("module_backward", name)
        if own[name].trained:
            yield Reached("gradient", own[name].name)
        yield Reached("inputs_backward", name)


def ledger(trace: StepTrace, **options: object) -> Ledger:
    return ledger_of(trace, Setting(**options))  # type: ignore[arg-type]


def taken(ledger: Ledger, term: str) -> list[Entry]:
    return [entry for entry in ledger.entries if entry.taken and entry.term == term]


def sizes(ledger: Ledger, term: str) -> list[float]:
    return [entry.size.fixed for entry in taken(ledger, term)]


def held_when(ledger: Ledger, term: str, number: object) -> set[tuple[object, ...]]:
    """Return the first two words of each key that is held when another one is taken first."""
    place = next(n for n, e in enumerate(ledger.entries) if e.taken and e.key[:2] == (term, number))
    return {entry.key[:2] for entry in ledger.live_after(place)}


def at_the_end(ledger: Ledger) -> list[Entry]:
    return list(ledger.live_after(len(ledger.entries) - 1))


LARGE, UNEVEN = weight("a", 1024, 1025), weight("a", 1025, 1024)


def test_a_size_is_a_polynomial() -> None:
    assert Size(1, 2, 3).at(10) == 321


# ---------------------------------------------------------------- a step


def test_what_a_micro_step_leaves_is_freed_in_the_next() -> None:
    plain = model_of(weight("a"))
    left = Allocated(0, Size(0, 10), "activation", "", "aten::mm")
    trace = replace(plain, micro_step=(left, Freed(0, carried=True), *plain.micro_step))
    for accumulate in (1, 3):
        ended = ledger(trace, accumulate=accumulate)
        assert [e.key for e in at_the_end(ended) if e.kind == "activation"] == [
            ("traced", 2 * accumulate, 0)
        ]


def test_an_optimizer_takes_its_elements_of_this_rank_in_both_steps() -> None:
    name = "a.weight"
    trace = model_of(
        weight("a", 4, 4),
        optimizer=OptimizerTrace(
            name="own",
            first=(OptimizerAllocated(0, name, 8, 100, "optimizer"),),
            later=(
                OptimizerAllocated(0, name, 4, 0, "optimizer"),
                Freed(0, carried=True),
                OptimizerAllocated(1, name, 2, 7, "temporary"),
                Freed(1),
            ),
        ),
    )
    half = ledger(trace)
    assert sizes(half, "optimizer") == [8 * 8 + 100, 4 * 8]
    assert sizes(half, "temporary") == [2 * 8 + 7]
    assert [e.size.fixed for e in at_the_end(half) if e.kind == "optimizer"] == [4 * 8]
    (moment,) = (n for n, e in enumerate(half.entries) if e.taken and e.kind == "temporary")
    assert half.phase_of(moment) == "step 2: optimizer"
    assert sizes(ledger(trace, strategy="ddp"), "optimizer")[0] == 8 * 16 + 100
    assert sizes(ledger(trace, cpu_offload=True), "optimizer") == [0, 0]


def test_buffers_stand_and_are_copied_to_be_put_back() -> None:
    def buffer(number: int, size: int, place: str) -> Allocated:
        return Allocated(number, Size(size), "buffer", place, "buffer")

    standing = (buffer(-1, 10**6, "a"), buffer(-2, 100, "a"), buffer(-3, 10**6, "norm"))
    trace = model_of(weight("a"), standing=standing)
    norm = {"norm": TracedModule(class_name="BatchNorm2d")}
    ended = ledger(replace(trace, modules={**trace.modules, **norm}))
    term = "copy of a buffer, for rolling back"
    assert sizes(ended, term) == [10**6, 100, 10**6]
    # later those that may move: small ones, and running statistics
    assert {e.key for e in at_the_end(ended) if e.term == term} == {(term, -2), (term, -3)}
    assert sum(e.size.fixed for e in at_the_end(ended) if e.key[0] == "standing") == 2_000_100


# ---------------------------------------------------------------- whole parameters


def test_a_large_gradient_is_reduced_where_it_is() -> None:
    assert not taken(ledger(model_of(LARGE), strategy="ddp"), "bucket of gradients")
    both = model_of(weight("a", 4), weight("b", 4))
    assert sizes(ledger(both, strategy="ddp"), "bucket of gradients") == [32, 32]


def test_the_first_step_reduces_from_the_last_parameter_on() -> None:
    trace = model_of(*(weight(str(n), n * MIB // 4) for n in (3, 2, 1)))
    assert sizes(ledger(trace, strategy="ddp"), "bucket of gradients") == [6 * MIB, 6 * MIB]


def test_a_bucket_is_reduced_when_its_last_gradient_is_there() -> None:
    trace = model_of(*(weight(str(n), MIB // 2) for n in range(4)))
    steps = ledger(trace, strategy="ddp")
    begins = {
        entry.key[2]: {e.place for e in steps.live_after(place) if e.kind == "gradient"}
        for place, entry in enumerate(steps.entries)
        if entry.taken and entry.key[:2] == ("bucket of gradients", 2)
    }
    half = {"3.weight", "2.weight"}
    assert begins == {0: half, 1: half | {"1.weight", "0.weight"}}


def test_zero1_sends_large_uneven_rows_in_place_and_pads_small_ones() -> None:
    term, copy = "rows gathered together", "gloo's all-gather copy"
    zero1 = {"strategy": "zero1", "backend": "gloo"}
    uneven, even = ledger(model_of(UNEVEN), **zero1), ledger(model_of(LARGE), **zero1)
    assert (sizes(uneven, term), sizes(uneven, copy)) == ([], [])
    assert (sizes(even, term), sizes(even, copy)) == ([], [LARGE.bytes] * 2)
    small = ledger(model_of(weight("a", 5, 3), weight("b", 8, trained=False)), **zero1)
    assert sizes(small, term) == sizes(small, copy) == [2 * 3 * 3 * 4] * 2


# ---------------------------------------------------------------- units


def test_the_next_unit_is_gathered_while_one_computes_backward() -> None:
    steps = ledger(model_of(*(weight(name) for name in "abc")))
    held = held_when(steps, "reduce-scatter input", 2)
    assert ("all-gather buffer", 1) in held
    assert ("all-gather buffer", 2) not in held
    assert ("gathered", "c.weight") not in held
    assert ("whole gradient", "c.weight") in held


def test_a_forward_keeps_one_buffer_until_the_next_gathering_has_begun() -> None:
    steps = ledger(model_of(weight(""), *(weight(name) for name in "abc")))
    assert ("all-gather buffer", 0) in held_when(steps, "all-gather buffer", 1)
    assert ("all-gather buffer", 0) not in held_when(steps, "all-gather buffer", 2)
    begins = next(phase.entry for phase in steps.phases if phase.name.endswith("backward"))
    held = {entry.key for entry in steps.live_after(begins - 1)}
    assert not [key for key in held if key[0] == "all-gather buffer"]
    assert [key for key in held if key[0] == "gathered"] == [("gathered", ".weight")]


def test_units_of_two_modules_are_freed_after_both() -> None:
    trace = model_of(weight("a"), weight("b"), units={"blocks": (("a", "b"),)})
    # two parameters, forward and backward, in two steps
    assert len(taken(ledger(trace), "gathered")) == 2 * 2 * 2


def test_what_is_computed_again_is_gathered_before_its_backward() -> None:
    plain = model_of(weight("a"))
    at = plain.micro_step.index(Reached("module_backward", "a"))
    again = (
        Reached("recompute", "a"),
        Allocated(0, Size(1), "activation", "a", "aten::mm"),
        Reached("recompute_end", "a"),
    )
    events = (*plain.micro_step[:at], *again, *plain.micro_step[at:-1], Freed(0))
    steps = ledger(replace(plain, micro_step=(*events, plain.micro_step[-1])))
    assert ("gathered", "a.weight") in held_when(steps, "traced", 1)


def test_padded_rows_are_gathered_and_reduced() -> None:
    steps = ledger(model_of(weight("a", 5, 3)))
    for term in ("gathered", "all-gather buffer", "reduce-scatter input"):
        assert set(sizes(steps, term)) == {6 * 3 * 4}, term
    assert set(sizes(steps, "parameter")) == {3 * 3 * 4}


def test_tied_parameters_are_in_one_unit() -> None:
    trace = model_of(weight("a"), weight("b"))
    tied = TracedModule(class_name="Block", parameters=("a.weight", "b.weight"))
    steps = ledger(replace(trace, modules={**trace.modules, "b": tied}))
    assert set(sizes(steps, "all-gather buffer")) == {64}


def test_streams_of_fsdp2_have_memory_of_their_own() -> None:
    steps = ledger(model_of(weight("a")))
    streams = {entry.term: entry.stream for entry in steps.entries}
    assert streams == {
        "parameter": 0,
        "all-gather buffer": 1,
        "gathered": 0,
        "whole gradient": 0,
        "reduce-scatter input": 0,
        "gradient": 2,
    }


def test_parameters_that_are_not_cut_are_whole_with_their_gradients() -> None:
    trace = model_of(weight("a", whole=True), weight("b"))
    steps = ledger(trace, accumulate=2)
    assert sorted(sizes(steps, "parameter")) == [32, 64]
    assert sizes(steps, "gradient").count(64) == 2  # one a step
    offloaded = ledger(trace, cpu_offload=True)
    assert sizes(offloaded, "parameter") == [64]


def test_what_backward_leaves_out_is_reduced_as_zeros() -> None:
    trace = model_of(weight("a"), weight("b", trained=False))
    unused = {"b.weight": weight("b")}
    steps = ledger(replace(trace, parameters={**trace.parameters, **unused}))
    assert len(taken(steps, "reduce-scatter input")) == 4


def test_casts_of_whole_parameters_are_not_there_under_sharding() -> None:
    plain = model_of(weight("a", compute_bytes=2), precision="bf16")
    cast = Allocated(0, Size(32), "gathered", "a.weight", "aten::_to_copy")
    trace = replace(plain, micro_step=(cast, Freed(0), *plain.micro_step))
    assert not [e for e in ledger(trace).entries if e.key[0] == "traced"]
    assert [e for e in ledger(trace, strategy="ddp").entries if e.key[0] == "traced"]


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        ({"world_size": 1}, {"cast of a shard": 32}),
        ({"backend": "gloo"}, {"gradient cast to be added": 64}),
        ({}, {"whole gradient": 32, "accumulated gradient": 64, "reduce-scatter input": 64}),
    ],
)
def test_low_precision_adds_up_in_fp32(options: dict[str, object], terms: dict[str, float]) -> None:
    trace = model_of(weight("a", compute_bytes=2), precision="bf16")
    steps = ledger(trace, accumulate=2, accumulate_sync="last", **options)
    for term, size in terms.items():
        assert set(sizes(steps, term)) == {size}, term
    if options.get("backend") != "gloo":
        assert not taken(steps, "gradient cast to be added")
