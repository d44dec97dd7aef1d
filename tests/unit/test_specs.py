"""Every spec checks its values once, when it is made."""

from typing import Any

import pytest

from fsdp_magic.core.options import options_of
from fsdp_magic.core.specs import (
    EmptySpec,
    EvalSpec,
    InitSpec,
    ModelSpec,
    NamesSpec,
    PullSpec,
    RunSpec,
    ShardsSpec,
    TrainSpec,
    parse_ranks,
)
from fsdp_magic.core.units import GIB
from fsdp_magic.errors import UsageError

SPECS = (
    EvalSpec,
    InitSpec,
    ModelSpec,
    NamesSpec,
    PullSpec,
    RunSpec,
    ShardsSpec,
    TrainSpec,
    EmptySpec,
)

REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (InitSpec, {"n": 0}, "-n 0"),
    (InitSpec, {"n": 1.5}, "-n 1.5"),
    (InitSpec, {"n": True}, "-n True"),
    (InitSpec, {"device": "tpu"}, "--device 'tpu'"),
    (InitSpec, {"seed": -1}, "--seed -1"),
    (InitSpec, {"strategy": "zero9"}, "--strategy 'zero9'"),
    (InitSpec, {"memory_limit": "much"}, "--memory-limit 'much'"),
    (InitSpec, {"memory_limit": "2GiB", "device": "cuda"}, "--memory-limit is for CPU"),
    (ModelSpec, {"strategy": "all"}, "--strategy 'all'"),
    (ModelSpec, {"shard_size": 0}, "--shard-size 0 cannot work"),
    (ModelSpec, {"wrap": "size:0"}, "--wrap size:0 cannot work"),
    (ModelSpec, {"wrap": "size:"}, "--wrap size: cannot work"),
    (ModelSpec, {"wrap": "size:1e99"}, "--wrap size:1e99 cannot work"),
    (ModelSpec, {"wrap": "a b"}, "--wrap 'a b' is no rule; it takes blocks, size:NUM_PARAMS"),
    (ModelSpec, {"wrap": "GPT2Block,"}, "--wrap 'GPT2Block,' is no rule"),
    (ModelSpec, {"wrap": None}, "--wrap None cannot work"),
    (ModelSpec, {"wrap": []}, "--wrap [] cannot work"),
    (ModelSpec, {"activation_checkpointing": [1]}, "--activation-checkpointing '[1]'"),
    (RunSpec, {"timeout": 0}, "--timeout 0"),
    (RunSpec, {"timeout": -1.0}, "--timeout -1.0"),
    (RunSpec, {"timeout": float("nan")}, "--timeout nan"),
    (RunSpec, {"timeout": True}, "--timeout True"),
    (TrainSpec, {"steps": 0}, "--steps 0"),
    (TrainSpec, {"data": "d", "epochs": 0}, "--epochs 0"),
    (TrainSpec, {"data": "d", "micro_batch_size": 0}, "--micro-batch-size 0"),
    (TrainSpec, {"accumulate": 0}, "--accumulate 0"),
    (TrainSpec, {"accumulate": "4"}, "--accumulate '4'"),
    (TrainSpec, {"max_grad_norm": 0}, "--max-grad-norm 0"),
    (TrainSpec, {"max_grad_norm": float("nan")}, "--max-grad-norm nan"),
    (TrainSpec, {"data": "d", "steps": 1, "epochs": 1}, "--steps 1 and --epochs 1"),
    (TrainSpec, {"epochs": 1}, "--epochs needs data"),
    (TrainSpec, {"collate": "f"}, "--collate needs data"),
    (TrainSpec, {"no_shuffle": True}, "--no-shuffle needs data"),
    (TrainSpec, {"micro_batch_size": 4}, "--micro-batch-size needs data"),
    (TrainSpec, {"output": "a b"}, "-o 'a b'"),
    (TrainSpec, {"output": "if"}, "-o 'if' is not a name; give one such as -o run"),
    (TrainSpec, {"timeout": 0}, "--timeout 0 cannot work"),
    (TrainSpec, {"loss": "worst"}, "--loss 'worst' is not known; it takes mean, tokens, sum"),
    (TrainSpec, {"nan": "ignore"}, "--nan 'ignore' is not known; it takes show, stop"),
    (TrainSpec, {"scheduler_every": "batch"}, "'batch' is not known; it takes step, epoch"),
    (TrainSpec, {"data": "d", "data_sharding": "some"}, "'some' is not known; it takes auto, none"),
    (TrainSpec, {"data_sharding": "none"}, "--data-sharding needs data; add --data NAME"),
    (TrainSpec, {"tokens_per_batch": 100}, "--tokens-per-batch needs data"),
    (TrainSpec, {"global_batch_size": 8}, "--global-batch-size needs data"),
    (TrainSpec, {"data": "d", "global_batch_size": 0}, "--global-batch-size 0 cannot work"),
    (TrainSpec, {"data": "d", "tokens_per_batch": 0}, "--tokens-per-batch 0 cannot work"),
    (
        TrainSpec,
        {"data": "d", "global_batch_size": 8, "accumulate": 2},
        "--global-batch-size 8 sets --accumulate; give one of the two",
    ),
    (
        TrainSpec,
        {"data": "d", "tokens_per_batch": 9, "micro_batch_size": 2},
        "--tokens-per-batch 9 and --micro-batch-size 2 say two sizes of a batch; give one",
    ),
    (
        TrainSpec,
        {"data": "d", "tokens_per_batch": 9, "global_batch_size": 2},
        "--tokens-per-batch 9 and --global-batch-size 2 say two sizes of a batch; give one",
    ),
    (TrainSpec, {"eval_every": 0}, "--eval-every 0 cannot work; it takes a whole number from 1"),
    (TrainSpec, {"eval_every": "week"}, "'week' cannot work; it takes a whole number or epoch"),
    (TrainSpec, {"eval_every": "epoch"}, "--eval-every epoch needs data; add --data NAME"),
    (TrainSpec, {"data": "d", "eval_data": "e"}, "add --eval-every N or --eval-every epoch"),
    (TrainSpec, {"eval_every": 2, "eval_data": "e"}, "--eval-data needs data; add --data NAME"),
    (TrainSpec, {"trial": True, "resume": True}, "--trial takes every step back"),
    (TrainSpec, {"log": 3}, "--log is a int; it takes a function, called as FUNC({...}, step=n)"),
    (TrainSpec, {"manual": True, "accumulate": 2}, "--accumulate is the cell's own business"),
    (TrainSpec, {"manual": True, "max_grad_norm": 1.0}, "with --manual; clip in the cell"),
    (TrainSpec, {"manual": True, "loss": "sum"}, "--manual; weigh the loss in the cell"),
    (TrainSpec, {"manual": True, "nan": "stop"}, "--manual; call fsdp.stop() in the cell"),
    (TrainSpec, {"manual": True, "scheduler_every": "step"}, "step schedulers in the cell"),
    (
        TrainSpec,
        {"manual": True, "data": "d", "global_batch_size": 4},
        "--global-batch-size is the cell's own business with --manual",
    ),
    (
        TrainSpec,
        {"manual": True, "data": "d", "eval_every": 2, "eval_data": "e"},
        "write a %%fsdp_eval cell, run it once, and leave --eval-data out",
    ),
    (EvalSpec, {"collate": "f"}, "--collate needs data; add --data NAME, or leave --collate out"),
    (EvalSpec, {"micro_batch_size": 2}, "--micro-batch-size needs data"),
    (EvalSpec, {"data": "d", "micro_batch_size": 0}, "--micro-batch-size 0"),
    (EvalSpec, {"timeout": -1}, "--timeout -1"),
    (EvalSpec, {"output": "1"}, "-o '1' is not a name"),
    (PullSpec, {"rank": "one"}, "--rank 'one'"),
    (PullSpec, {"rank": "-1"}, "--rank '-1'"),
    (ShardsSpec, {"names": ("a", "b")}, "one model at a time"),
]


@pytest.mark.parametrize(("spec", "values", "message"), REFUSED)
def test_a_value_that_cannot_work_is_refused_by_name(
    spec: type[Any], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        spec(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", SPECS)
def test_defaults_are_allowed(spec: type[Any]) -> None:
    assert spec() == spec()


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_cannot_be_changed(spec: type[Any]) -> None:
    with pytest.raises((AttributeError, TypeError)):
        spec().names = ()


@pytest.mark.parametrize("spec", SPECS)
def test_every_option_has_help_and_no_flag_means_two_things(spec: type[Any]) -> None:
    options = options_of(spec)
    assert all(option.help for option in options.values())
    flags = [flag for option in options.values() for flag in (*option.flags, *option.habits)]
    assert len(flags) == len(set(flags))
    assert all(flag.startswith("-") for flag in flags)


@pytest.mark.parametrize("spec", SPECS)
def test_the_first_flag_of_a_field_is_its_own_name(spec: type[Any]) -> None:
    short = {"n": "-n", "output": "-o"}
    for name, option in options_of(spec).items():
        if not option.many:
            assert option.flags[0] == short.get(name, "--" + name.replace("_", "-"))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("FULL_SHARD", "full_shard"),
        ("fsdp", "full_shard"),
        ("zero3", "full_shard"),
        ("ZeRO2", "shard_grad_op"),
        ("SHARD_GRAD_OP", "shard_grad_op"),
        ("ZERO1", "zero1"),
        ("NO_SHARD", "ddp"),
        ("HYBRID_SHARD", "hybrid_shard"),
    ],
)
def test_strategies_have_the_names_of_other_tools(typed: str, meant: str) -> None:
    assert ModelSpec(strategy=typed).strategy == meant  # type: ignore[arg-type]
    assert InitSpec(strategy=typed).defaults.strategy == meant  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ({"loss": "TOKENS"}, {"loss": "tokens"}),
        ({"scheduler_every": "Epoch"}, {"scheduler_every": "epoch"}),
        ({"data": "d", "eval_every": "EPOCH"}, {"data": "d", "eval_every": "epoch"}),
        ({"nan": "Stop"}, {"nan": "stop"}),
    ],
)
def test_choices_may_be_typed_in_any_case(typed: dict[str, Any], meant: dict[str, Any]) -> None:
    assert TrainSpec(**typed) == TrainSpec(**meant)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("BLOCKS", "blocks"),
        ("None", "none"),
        ("Size:2k", "size:2000"),
        ("size:1.5M", "size:1500000"),
        ("size:1e6", "size:1000000"),
        ("GPT2Block, LlamaDecoderLayer", "GPT2Block,LlamaDecoderLayer"),
        (["A", "B"], "A,B"),
    ],
)
def test_a_wrap_rule_is_read_as_it_is_meant(typed: Any, meant: str) -> None:
    assert ModelSpec(wrap=typed).wrap == meant


@pytest.mark.parametrize(
    ("typed", "meant"), [(True, "blocks"), (None, False), ("BLOCKS", "blocks")]
)
def test_activation_checkpointing_alone_means_blocks(typed: Any, meant: Any) -> None:
    assert ModelSpec(activation_checkpointing=typed).activation_checkpointing == meant


def test_a_single_name_is_one_name() -> None:
    assert ModelSpec(names="model").names == ("model",)  # type: ignore[arg-type]
    assert ModelSpec(names=["a", "b"]).names == ("a", "b")  # type: ignore[arg-type]


def test_the_memory_limit_is_in_bytes() -> None:
    assert InitSpec(memory_limit="2GiB").memory_limit_bytes == 2 * GIB
    assert InitSpec().memory_limit_bytes is None


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", (0,)), ("0,2-3", (0, 2, 3)), ("3,1", (1, 3)), ("1-1", (1,)), ("0-1,1-2", (0, 1, 2))],
)
def test_ranks_are_lists_and_ranges(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, world_size=4) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "4", "2-9", "1,,2", "2-1"])
def test_ranks_outside_the_world_or_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        parse_ranks(text, world_size=4)
