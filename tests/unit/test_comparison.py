"""What %fsdp_compare takes, and what it shows."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fsdp_magic.core.specs import CompareSpec, ModelSpec
from fsdp_magic.core.specs.compare import Variant
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
        ("hybrid_shard", {"strategy": "hybrid_shard", "shard_size": 2}),
    ],
)
def test_a_variant_changes_what_it_names(text, changes):
    spec = ModelSpec(names=("model",), wrap="none")
    asked = Variant.parsed(text).applied(spec, world_size=4)
    assert asked == dataclasses.replace(spec, **changes)


def test_what_a_variant_does_not_name_is_as_the_model_was_built():
    spec = ModelSpec(precision="bf16", cpu_offload=True, activation_checkpointing=True)
    assert Variant.parsed("shard_grad_op").applied(spec, world_size=2).cpu_offload
    now = ModelSpec(strategy="hybrid_shard")  # shared by host
    assert Variant.parsed("hybrid_shard").applied(now, world_size=8) == now
    ddp = Variant.parsed("ddp").applied(spec, world_size=2)
    assert ddp.precision == "bf16"
    assert ddp.activation_checkpointing == spec.activation_checkpointing
    assert not ddp.cpu_offload, "whole parameters stay on the device"


@pytest.mark.parametrize(
    ("strategies", "error"),
    [
        ("ful_shard", "did you mean full_shard"),
        ("ddp+bf17", "'bf17' in 'ddp\\+bf17' is not known; behind a strategy stand fp32, bf16"),
        ("ddp+bf16+fp16", "says the same twice"),
        ("full_shard,zero3", "names full_shard twice"),
        ("", "--strategy"),
        (7, "is no name"),
    ],
)
def test_a_wrong_strategy_is_refused_in_one_line(strategies, error):
    with pytest.raises(UsageError, match=error) as caught:
        CompareSpec(strategies=strategies)
    assert len(str(caught.value).splitlines()) == 1


def test_without_a_list_every_strategy_that_the_world_allows_is_compared():
    names = [variant.name for variant in CompareSpec().variants(world_size=2)]
    assert names == ["full_shard", "shard_grad_op", "zero1", "ddp"]
    assert CompareSpec().variants(world_size=4)[-1].name == "hybrid_shard"
    chosen = CompareSpec(strategies="ddp, full_shard").variants(world_size=4)
    assert [variant.name for variant in chosen] == ["ddp", "full_shard"]


def compared() -> Comparison:
    spec = CompareSpec(strategies=["full_shard", "ddp", "zero1"], steps=2)
    comparison = Comparison(spec, world_size=2, present=("full_shard",))
    for name, losses in (("full_shard", (2.0, 1.0)), ("ddp", (2.0, 1.0 + 1e-6))):
        comparison.add(
            Compared(
                name=name,
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


def test_the_panel_needs_no_styles_and_no_scripts():
    html, _ = compared().last_frame
    for part in ("<style", "<script", "<svg", "class="):
        assert part not in html


def test_a_hostile_name_means_itself():
    row = panel.ComparedView(name="<b>\x1b[31m", failure="\x1b]0;x\x07<i>")
    view = panel.ComparisonView(rows=[row], pending=["<u>"], steps=1, warm_up=2, ranks=1, stamp="")
    html = panel.html(view)
    assert "<b>\x1b" not in html
    assert "<i>" not in html
    assert "<u>" not in html
    assert "\x1b" not in panel.text(view)
