"""What %fsdp_compare takes, and what it shows."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fsdp_magic.core.specs import CompareSpec, ModelSpec
from fsdp_magic.core.specs.compare import Variant, as_built
from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.errors import UsageError
from fsdp_magic.notebook.comparison import Compared, Comparison
from fsdp_magic.panels import comparison as panel

MEMORY = MemorySample(
    allocated_bytes=40 << 20,
    reserved_bytes=90 << 20,
    used_bytes=95 << 20,
    capacity_bytes=1 << 30,
    peak_allocated_bytes=41 << 20,
    parameter_bytes=10 << 20,
    gradient_bytes=5 << 20,
    optimizer_bytes=20 << 20,
)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("ddp", {"strategy": "ddp"}),
        ("FSDP", {"strategy": "full_shard"}),
        ("ddp+bf16", {"strategy": "ddp", "precision": "bf16"}),
        ("full-shard+cpu-offload", {"strategy": "full_shard", "cpu_offload": True}),
        (
            "zero2+fp16+activation_checkpointing",
            {"strategy": "shard_grad_op", "precision": "fp16", "activation_checkpointing": True},
        ),
        ("hybrid-shard:2", {"strategy": "hybrid_shard", "shard_size": 2}),
        ("ZeRO-2+bfloat16", {"strategy": "shard_grad_op", "precision": "bf16"}),
        (
            "ddp+gradient_checkpointing",
            {"strategy": "ddp", "activation_checkpointing": "blocks"},
        ),
    ],
)
def test_a_variant_changes_what_it_names(text, changes):
    spec = ModelSpec(names=("model",), wrap="none")
    asked = Variant.parsed(text).applied(spec)
    assert asked == dataclasses.replace(spec, **changes)


def test_what_a_variant_does_not_name_is_as_the_model_was_built():
    spec = ModelSpec(precision="bf16", cpu_offload=True, activation_checkpointing=True)
    assert Variant.parsed("shard_grad_op").applied(spec).cpu_offload
    ddp = Variant.parsed("ddp").applied(spec)
    assert ddp.precision == "bf16"
    assert ddp.activation_checkpointing == spec.activation_checkpointing
    assert not ddp.cpu_offload, "whole parameters stay on the device"


@pytest.mark.parametrize(
    ("strategies", "error"),
    [
        ("ful_shard", "--strategies 'ful_shard' is not known; did you mean full_shard"),
        ("dpd", "--strategies 'dpd' is not known; did you mean ddp"),
        ("ddp:2", "only hybrid_shard has a size"),
        ("hybrid_shard:two", "behind hybrid_shard stands a number of ranks"),
        ("hybrid_shard:9999999999", "behind hybrid_shard stands a number of ranks"),
        ("hybrid_shard:0", "behind hybrid_shard stands a number of ranks"),
        ("ddp+cpu_ofload", "did you mean cpu_offload"),
        ("ddp+bf17", "'bf17' in 'ddp\\+bf17' is not known; behind a strategy stand fp32, bf16"),
        ("ddp+bf16+fp16", "says the same twice"),
        ("full_shard,zero3", "names full_shard twice"),
        ("", "--strategies"),
        (7, "is no name"),
    ],
)
def test_a_wrong_strategy_is_refused_in_one_line(strategies, error):
    with pytest.raises(UsageError, match=error) as caught:
        CompareSpec(strategies=strategies)
    assert len(str(caught.value).splitlines()) == 1


def shown(spec: CompareSpec, *built: ModelSpec, ranks: int, on_host: int = 0) -> list[str]:
    models = built or (ModelSpec(),)
    on_host = on_host or ranks
    return [v.name for v in spec.variants(models, world_size=ranks, ranks_on_host=on_host)]


def test_without_a_list_every_strategy_that_the_world_allows_is_compared():
    assert shown(CompareSpec(), ranks=2) == ["ddp", "zero1", "shard_grad_op", "full_shard"]
    chosen = CompareSpec(strategies="full_shard, ddp")
    assert shown(chosen, ranks=4) == ["full_shard", "ddp"]


def test_a_row_of_hybrid_shard_says_how_many_ranks_share_a_copy():
    assert shown(CompareSpec(), ranks=4)[2] == "hybrid_shard:2"
    assert shown(CompareSpec(), ranks=6)[2] == "hybrid_shard:3"
    assert shown(CompareSpec(), ranks=8, on_host=2)[2] == "hybrid_shard:2"
    built = ModelSpec(strategy="hybrid_shard", shard_size=4)
    assert shown(CompareSpec(), built, ranks=16)[2] == "hybrid_shard:4"
    said = CompareSpec(strategies="hybrid_shard:8+bf16,hybrid_shard")
    assert shown(said, built, ranks=16) == ["hybrid_shard:8+bf16", "hybrid_shard:4"]


def test_two_rows_that_are_one_for_the_model_as_it_was_built_are_refused():
    spec = CompareSpec(strategies="full_shard,full_shard+bf16")
    assert len(shown(spec, ranks=2)) == 2
    with pytest.raises(UsageError, match="are the same for a model built with --wrap none --pr"):
        shown(spec, ModelSpec(precision="bf16", wrap="none"), ranks=2)


def test_a_size_that_is_the_default_is_not_compared_with_it():
    with pytest.raises(UsageError, match="hybrid_shard and hybrid_shard:2 are the same"):
        shown(CompareSpec(strategies="hybrid_shard,hybrid_shard:2"), ranks=4)


def test_what_a_model_was_built_with_is_said_as_it_is_typed():
    assert as_built([ModelSpec(strategy="ddp")]) == ""
    built = [ModelSpec(precision="bf16", compile=True), ModelSpec(wrap="size:9", precision="bf16")]
    assert as_built(built) == "--wrap size:9 --precision bf16 --compile"


def compared() -> Comparison:
    spec = CompareSpec(strategies=["full_shard", "ddp", "zero1"], steps=2)
    built = (ModelSpec(wrap="none"),)
    variants = spec.variants(built, world_size=2, ranks_on_host=2)
    comparison = Comparison(variants, built, steps=spec.steps, world_size=2)
    for name, losses in (("full_shard", (2.0, 1.0)), ("ddp", (2.0, 1.0 + 1e-6))):
        comparison.add(
            Compared(
                name=name,
                is_present=name == "full_shard",
                idle_bytes=(7 << 20, 9 << 20),
                losses=losses,
                seconds_per_step=0.025,
                samples_per_second=320.0,
                peak_bytes=(41 << 20, 39 << 20),
                peak_memory=(MEMORY, dataclasses.replace(MEMORY, peak_allocated_bytes=39 << 20)),
            )
        )
    return comparison


def test_the_largest_difference_of_losses_is_relative_to_the_first_strategy():
    comparison = compared()
    assert comparison.largest_difference == pytest.approx(1e-6)
    assert comparison["no_shard"].losses[1] == 1.0 + 1e-6
    comparison.add(Compared(name="zero1", losses=(math.nan, 1.0)))
    assert comparison.largest_difference == math.inf


def test_the_table_has_a_row_for_each_strategy_also_for_one_that_did_not_fit():
    comparison = compared()
    assert "to come: zero1" in comparison.last_frame[1]
    comparison.add(Compared(name="zero1", failure="out of memory: <rank 1> had 2 GiB"))
    html, text = comparison.last_frame
    for shown in (html, text):
        assert "full_shard (as now)" in shown
        assert "25.0" in shown
        assert "320" in shown
        assert "1e-06" in shown
        assert "41.0" in shown
        assert "parameters 10.0, gradients 5.0, optimizer 20.0, activations 5.0 MiB" in shown
        assert "out of memory" in shown
        assert "to come" not in shown
    assert "&lt;rank 1&gt;" in html
    assert "<rank 1>" not in html
    assert "zero1 did not run" in repr(comparison)


def test_what_is_not_of_the_model_is_said_beneath_the_table():
    for shown in compared().last_frame:
        assert "without the model, data and libraries: 9.0 MiB" in shown
        assert "What a row does not name is as the model was built: --wrap none" in shown
        assert "reference" in shown
        assert "cache" not in shown


def test_one_that_was_not_compared_is_a_key_error_with_the_names():
    for name in ("zero1", "nothing"):
        with pytest.raises(KeyError, match=f"{name} was not compared; compared: full_shard, ddp"):
            compared()[name]
    assert repr(compared()["ddp"]) == "<ddp: 25.0 ms a step, peak 41.0 MiB>"


def test_the_panel_needs_no_styles_and_no_scripts():
    html, _ = compared().last_frame
    for part in ("<style", "<script", "<svg", "class="):
        assert part not in html


def test_one_step_is_one_and_gradients_are_in_the_key_only_where_a_bar_has_them():
    memory = dataclasses.replace(MEMORY, gradient_bytes=0)
    row = panel.ComparedView(name="ddp", losses=(1.0,), memory=memory, peak_bytes=(8, 9 << 20))
    view = panel.ComparisonView(rows=[row], pending=[], steps=1, warm_up=2, ranks=1, stamp="")
    for shown in (panel.html(view), panel.text(view)):
        assert "1 step after" in shown
        assert "</span> gradients" not in shown
        assert "G gradients" not in shown
    assert 'aria-label="rank 1:' in panel.html(view), "the fullest"


def test_a_hostile_name_means_itself():
    row = panel.ComparedView(name="<b>\x1b[31m", failure="\x1b]0;x\x07<i>")
    view = panel.ComparisonView(rows=[row], pending=["<u>"], steps=1, warm_up=2, ranks=1, stamp="")
    html = panel.html(view)
    assert "<b>\x1b" not in html
    assert "<i>" not in html
    assert "<u>" not in html
    assert "\x1b" not in panel.text(view)
