"""What can be typed behind ``%fsdp_plan``, what it means, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_magic.core.specs import ModelSpec, PlanSpec
from fsdp_magic.core.specs.plan import PLANNED
from fsdp_magic.errors import UsageError
from fsdp_magic.notebook.options import parse, spec_of
from fsdp_magic.notebook.planning import device_for, specs_of, traced_variants, without_repeats


def plan(line: str) -> PlanSpec:
    return parse(line, PlanSpec, magic="%%fsdp_plan")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--gpus 8 --sequence-length 512", {"world_size": 8, "seq_len": 512}),
        ("--num_gpus 4 --max-length 64", {"world_size": 4, "seq_len": 64}),
        ("-n 2 --max-seq-length 64", {"world_size": 2, "seq_len": 64}),
        ("--bf16 --batch-size 4", {"precision": "bf16", "micro_batch_size": 4}),
        ("--gradient-accumulation-steps 2", {"accumulate": 2}),
        ("--strategy ZeRO-3,ddp+bfloat16", {"strategies": ("full_shard", "ddp+bf16")}),
        (
            "--strategies full-shard+gradient-checkpointing",
            {"strategies": ("full_shard+activation_checkpointing",)},
        ),
        ("--fsdp-min-num-params 1e6", {"wrap": "size:1000000"}),
        ("--card T4 --cuda-context 500MiB", {"gpu_memory": "T4", "context_memory": "500MiB"}),
        ("--nccl-memory 0 --no-cache", {"nccl_memory": "0", "no_cache": True}),
    ],
)
def test_what_people_type_by_habit_is_taken(line: str, meant: dict[str, Any]) -> None:
    assert plan(line) == PlanSpec(**meant)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--world-size 0", "--world-size 0 cannot work; it takes a whole number from 1"),
        ("--world-size 9999999", "it takes up to 1,000,000"),
        ("--seq-len long", "--seq-len 'long' is not a whole number"),
        ("--strategies ddp,dpd", "did you mean ddp?"),
        ("--strategies ddp,no_shard", "--strategies names ddp twice; name it once"),
        ("--strategies zero1+cpu_offload", "use it with full_shard, shard_grad_op or hybrid_shard"),
        ("--strategies ddp:4", "only hybrid_shard has a size"),
        ("--precision fp8", "it takes fp32, bf16, fp16"),
        ("--accumulate-sync never", "did you mean every? It takes every, last"),
        ("--wrap size", "such as size:1000000"),
        ("--context-memory much", "--context-memory 'much' is not a size"),
        ("-o 1x", "-o '1x' is not a name; give one such as -o plan"),
        ("--gpu-memry 2GiB", "did you mean --gpu-memory?"),
        ("full_shard", "did you mean --strategies full_shard?"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(line: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(line)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("size", ["24", "-2GiB", "V1000", "100MiB"])
def test_a_device_that_is_none_is_refused_in_one_line(size: str) -> None:
    with pytest.raises(UsageError, match="--gpu-memory") as caught:
        device_for(PlanSpec(gpu_memory=size), world_size=2)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_kept_from_tensors_can_be_said() -> None:
    spec = PlanSpec(gpu_memory="10GiB", context_memory="1GiB", nccl_memory="0")
    assert device_for(spec, world_size=8).usable_bytes == 9 * 2**30


def test_options_are_keywords_in_python() -> None:
    options = {"gpu_memory": "24GiB", "world_size": 2, "strategies": ["ddp", "fsdp+bf16"]}
    spec = spec_of(options, PlanSpec, call="fsdp_magic.plan")
    assert spec.strategies == ("ddp", "full_shard+bf16")
    with pytest.raises(UsageError, match=r"did you mean seq_len\?"):
        spec_of({"seq_length_": 3}, PlanSpec, call="fsdp_magic.plan")


def specs(spec: PlanSpec, base: ModelSpec | None = None) -> dict[str, ModelSpec]:
    return specs_of(spec, spec.variants(world_size=4, ranks_on_host=4), base)


def test_without_strategies_a_useful_set_is_planned() -> None:
    assert tuple(specs(PlanSpec())) == PLANNED


def test_a_strategy_adds_to_what_the_session_has() -> None:
    base = ModelSpec(precision="bf16", activation_checkpointing="selective", wrap="none")
    planned = specs(PlanSpec(strategies=("ddp", "full_shard+fp32", "hybrid_shard")), base)
    assert planned["ddp"].precision == "bf16"
    assert planned["full_shard+fp32"].precision == "fp32"
    assert planned["hybrid_shard:2"].shard_size == 2
    assert {spec.wrap for spec in planned.values()} == {"none"}
    assert specs(PlanSpec(precision="fp16"), base)["ddp"].precision == "fp16"


def test_copies_that_do_not_share_the_ranks_evenly_are_refused() -> None:
    uneven = PlanSpec(strategies=("ddp", "hybrid_shard:3"))
    with pytest.raises(UsageError, match=r"hybrid_shard:3: 3 does not divide 4 ranks; it takes 2$"):
        specs(uneven)
    assert uneven.variants(world_size=6, ranks_on_host=6)
    with pytest.raises(UsageError, match="7 ranks; no size does; use full_shard"):
        uneven.variants(world_size=7, ranks_on_host=7)


def test_each_trace_is_made_once() -> None:
    assert traced_variants(specs(PlanSpec()).values()) == (("fp32", ""), ("fp32", "blocks"))


def test_strategies_that_are_one_for_a_model_are_planned_once() -> None:
    base = ModelSpec(activation_checkpointing="blocks")
    planned = without_repeats(specs(PlanSpec(), base), is_cpu=True)
    assert tuple(planned) == ("ddp", "zero1", "shard_grad_op", "full_shard")


@pytest.mark.parametrize("given", [0, 24])
def test_a_bare_number_is_no_memory_of_a_gpu(given: int) -> None:
    spec = PlanSpec(gpu_memory=given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"--gpu-memory '{given}'"):
        device_for(spec, world_size=2)
