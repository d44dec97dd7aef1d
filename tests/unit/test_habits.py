"""What people type because other tools have it: taken, or answered with what to type."""

from __future__ import annotations

import pytest

from fsdp_magic.core.specs import ModelSpec, TrainSpec
from fsdp_magic.errors import UsageError
from fsdp_magic.notebook.options import parse, spec_of


def model(line: str) -> ModelSpec:
    return parse(line, ModelSpec, magic="%%fsdp_model")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--fsdp full_shard", ModelSpec()),
        ("--sharding-strategy NO_SHARD", ModelSpec(strategy="ddp")),
        ("--fsdp_sharding_strategy SHARD_GRAD_OP", ModelSpec(strategy="shard_grad_op")),
        ("--zero-stage 2", ModelSpec(strategy="shard_grad_op")),
        ("--zero-stage=0", ModelSpec(strategy="ddp")),
        ("--strategy ZeRO-2", ModelSpec(strategy="shard_grad_op")),
        ("--strategy zero_1", ModelSpec(strategy="zero1")),
        ("--strategy full-shard", ModelSpec()),
        ("--precision bfloat16", ModelSpec(precision="bf16")),
        ("--precision Float16", ModelSpec(precision="fp16")),
        ("--fp32", ModelSpec()),
        ("--min-num-params 1e6", ModelSpec(wrap="size:1000000")),
        ("--torch-compile", ModelSpec(compile=True)),
        ("--offload-params", ModelSpec(cpu_offload=True)),
        ("--sync-bn", ModelSpec(sync_batchnorm=True)),
    ],
)
def test_other_tools_names_and_values_are_taken(line: str, meant: ModelSpec) -> None:
    assert model(line) == meant


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--wrap size", "--wrap size needs a number of parameters, such as size:1000000"),
        ("--wrap 1000000", "did you mean size:1000000?"),
        ("--wrap 1M net", "did you mean size:1M?"),
        ("--presicion bf16", "did you mean --precision?"),
        ("--strategy dpd", "did you mean ddp?"),
        ("--activation-checkpointing full", "takes blocks, selective; full cannot follow it"),
        ("--gradient-checkpointing true", "takes blocks, selective; true cannot follow it"),
        ("--activation-checkpointing selectve", "did you mean selective? A model of this name"),
        ("--cpu-offload true", "takes no value; true cannot follow it"),
        ("--bf16 yes", "stands before it: yes --bf16"),
        ("100", "'100' is no name of a model"),
        ("None", "'None' is no name of a model"),
    ],
)
def test_a_wrong_value_is_refused_before_any_cell_runs(line: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        model(line)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "line", ["full --activation-checkpointing", "--activation-checkpointing --bf16 fuller", "true"]
)
def test_a_model_may_have_any_name(line: str) -> None:
    assert len(model(line).names) == 1


def test_a_call_refuses_a_wrong_value_too() -> None:
    with pytest.raises(UsageError, match="--wrap size needs a number"):
        spec_of({"wrap": "size"}, ModelSpec, call="session.model")


def test_an_option_that_another_magic_has_is_not_taken_for_a_shorter_one() -> None:
    with pytest.raises(UsageError, match="%fsdp_init and %%fsdp_model have it"):
        parse("--accumulate-sync last", TrainSpec, magic="%%fsdp_train")
