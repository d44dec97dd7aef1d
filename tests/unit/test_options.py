"""From a magic's line to a spec."""

import inspect

import pytest

from fsdp_magic import init
from fsdp_magic.core.options import options_of
from fsdp_magic.core.specs import (
    CompareSpec,
    EmptySpec,
    EvalSpec,
    InitSpec,
    ModelSpec,
    PullSpec,
    RunSpec,
    TrainSpec,
)
from fsdp_magic.errors import UsageError
from fsdp_magic.notebook.help import keywords_text, options_text
from fsdp_magic.notebook.options import parse, spec_of
from fsdp_magic.notebook.session import Session


def train(line: str) -> TrainSpec:
    return parse(line, TrainSpec, magic="%%fsdp_train")


def refused(line: str, spec: type = TrainSpec, magic: str = "%%fsdp_train") -> str:
    """Return the one line that refuses a magic's line."""
    with pytest.raises(UsageError) as caught:
        parse(line, spec, magic=magic)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_line_becomes_a_spec() -> None:
    line = "--data train_data --steps 1000 --micro-batch-size 8 --accumulate 4 --max-grad-norm 1.0"
    assert train(line) == TrainSpec(
        data="train_data", steps=1000, micro_batch_size=8, accumulate=4, max_grad_norm=1.0
    )


def test_an_empty_line_gives_the_defaults() -> None:
    assert train("") == TrainSpec()
    assert train("   # nothing") == TrainSpec()


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("--step", "--steps"),
        ("--acumulate", "--accumulate"),
        ("--micro-batch", "--micro-batch-size"),
        ("--shuffle", "--no-shuffle"),
        ("--max-norm", "--max-grad-norm"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(typed: str, nearest: str) -> None:
    message = refused(f"--data d {typed} 4")
    assert typed in message
    assert f"did you mean {nearest}?" in message


def test_an_unknown_option_like_no_other_says_where_all_are_listed() -> None:
    message = refused("--qqqqq 4")
    assert message == "%%fsdp_train has no option --qqqqq; %fsdp_train? lists all options"


@pytest.mark.parametrize("typed", ["--lr", "--wandb", "--profile", "--checkpoint", "--bf16"])
def test_what_is_only_a_little_alike_is_not_suggested(typed: str) -> None:
    assert "did you mean" not in refused(f"{typed} 4")


def test_few_options_are_listed_at_once() -> None:
    message = refused("--qqqqq 4", RunSpec, "%%fsdp")
    assert message == "%%fsdp has no option --qqqqq; it takes --ranks, --timeout"


@pytest.mark.parametrize(
    ("flag", "spec", "magic", "where"),
    [
        ("--steps", ModelSpec, "%%fsdp_model", "%%fsdp_train and %fsdp_compare have it"),
        ("--max-steps", ModelSpec, "%%fsdp_model", "%%fsdp_train has it"),
        (
            "--strategy",
            TrainSpec,
            "%%fsdp_train",
            "%fsdp_init and %%fsdp_model have it; %fsdp_train? lists all options",
        ),
        ("--memory-limit", RunSpec, "%%fsdp", "%fsdp_init has it"),
        ("--rank", RunSpec, "%%fsdp", "did you mean --ranks? It takes --ranks, --timeout"),
    ],
)
def test_an_option_of_another_magic_says_whose_it_is(
    flag: str, spec: type, magic: str, where: str
) -> None:
    assert f"{magic} has no option {flag}; {where}" in refused(f"{flag} 4", spec, magic)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("steps=4", "did you mean --steps?"), ("Steps", "did you mean --steps?"), ("model", "lists")],
)
def test_an_option_without_its_dashes_is_recognised(word: str, hint: str) -> None:
    message = refused(f"--data d {word}")
    assert f"does not take '{word}'" in message
    assert hint in message


def test_a_value_without_its_option_is_recognised() -> None:
    message = refused("full_shard,ddp+bf16", CompareSpec, "%fsdp_compare")
    assert message.endswith("did you mean --strategies full_shard,ddp+bf16?")


@pytest.mark.parametrize(
    ("line", "spec", "hint"),
    [
        ("--loss men", TrainSpec, "did you mean mean? It takes mean, tokens, sum"),
        ("--strategy fullshard", ModelSpec, "did you mean full_shard?"),
        (
            "--strategy tp",
            ModelSpec,
            "it takes full_shard, shard_grad_op, zero1, ddp, hybrid_shard",
        ),
        ("--device gpu", InitSpec, "it takes auto, cuda, cpu"),
        ("--device CPUs", InitSpec, "did you mean cpu?"),
    ],
)
def test_a_wrong_value_says_what_is_allowed_and_the_nearest(
    line: str, spec: type, hint: str
) -> None:
    assert hint in refused(line, spec, "%%m")


@pytest.mark.parametrize(
    ("options", "spec", "message"),
    [
        ({"stepz": 3}, TrainSpec, "f() has no option stepz; did you mean steps? help(f) lists all"),
        ({"max_steps": 3}, TrainSpec, "f() has no option max_steps; did you mean steps?"),
        ({"qqq": 3}, TrainSpec, "f() has no option qqq; help(f) lists all"),
        ({"num": 2}, InitSpec, "f() has no option num; did you mean n?"),
        ({"stategy": "x"}, ModelSpec, "did you mean strategy?"),
        ({"data": 5}, TrainSpec, "--data 5 cannot work; it takes a name, as text"),
        ({"names": 5}, ModelSpec, "5 is no name"),
        ({"data": ""}, TrainSpec, "--data '' cannot work"),
    ],
)
def test_a_wrong_keyword_is_one_line_too(options: dict, spec: type, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(options, spec, call="f")
    assert message in str(caught.value)


def test_a_near_habit_is_answered_with_our_name() -> None:
    assert "did you mean --max-grad-norm?" in refused("--clipp 1")


@pytest.mark.parametrize("typed", ["--accum", "--micro", "--max-grad", "--da", "--s"])
def test_there_are_no_abbreviations(typed: str) -> None:
    assert f"has no option {typed}" in refused(f"{typed} 4")


@pytest.mark.parametrize(
    "line",
    [
        "--data d --micro_batch_size 4",
        "--data d --Micro-Batch-Size 4",
        "--data d --batch-size 4",
        "--data d --per_device_train_batch_size 4",
        "--data d --micro-batch-size=4",
        "--micro-batch-size=4 --dataset=d",
    ],
)
def test_habitual_names_underscores_and_equals_signs_mean_the_same(line: str) -> None:
    assert train(line) == TrainSpec(data="d", micro_batch_size=4)


@pytest.mark.parametrize(
    ("line", "spec"),
    [
        ("--gradient-accumulation-steps 4", TrainSpec(accumulate=4)),
        ("--clip 0.5", TrainSpec(max_grad_norm=0.5)),
        ("--max-steps 9", TrainSpec(steps=9)),
        ("--data d --num-train-epochs 2", TrainSpec(data="d", epochs=2)),
        ("-o run", TrainSpec(output="run")),
        ("--data d --no-shuffle", TrainSpec(data="d", no_shuffle=True)),
    ],
)
def test_other_tools_names_are_accepted(line: str, spec: TrainSpec) -> None:
    assert train(line) == spec


@pytest.mark.parametrize(
    "line", ["--steps", "--steps --accumulate 2", "--accumulate 2 --steps # 4"]
)
def test_a_missing_value_is_asked_for(line: str) -> None:
    assert "--steps needs a value: --steps N" in refused(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps many", "--steps 'many' is not a whole number"),
        ("--steps 1.5", "--steps '1.5' is not a whole number"),
        ("--steps=", "--steps needs a value: --steps N"),
        ("--data=", "--data needs a value: --data NAME"),
        ("--clip big", "--max-grad-norm 'big' is not a number"),
        ("--steps -1", "--steps -1 cannot work"),
        ("--data d --no-shuffle=yes", "--no-shuffle takes no value"),
        ("--steps 1 --steps 2", "--steps is given twice"),
        ("--steps 1 --max-steps 2", "--steps and --max-steps are one option"),
        ("model --steps 1", "does not take 'model'"),
        ('--data "train', "No closing quotation"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(line: str, message: str) -> None:
    assert message in refused(line)


def numbers(flag: str, expression: str) -> float:
    """Stand in for the engines."""
    known = {"n": 6, "cfg.batch": 4, 'h["clip"]': 0.5, "len(data) // 8": 12, "-n": -6}
    if expression not in known:
        raise UsageError(f"{flag} {expression} is no number on the engines")
    return known[expression]


@pytest.mark.parametrize(
    ("line", "spec"),
    [
        ("--steps n", TrainSpec(steps=6)),
        ("--data d --micro-batch-size cfg.batch", TrainSpec(data="d", micro_batch_size=4)),
        ('--clip h["clip"]', TrainSpec(max_grad_norm=0.5)),
        ("--steps 'len(data) // 8'", TrainSpec(steps=12)),
        ("--data d --eval-every epoch", TrainSpec(data="d", eval_every="epoch")),
        ("--data d --eval-every EPOCH", TrainSpec(data="d", eval_every="epoch")),
        ("--eval-every n", TrainSpec(eval_every=6)),
        ("--eval-every 3", TrainSpec(eval_every=3)),
        ("--timeout 1.5", TrainSpec(timeout=1.5)),
    ],
)
def test_a_number_may_be_given_by_its_name(line: str, spec: TrainSpec) -> None:
    assert parse(line, TrainSpec, magic="%%fsdp_train", numbers=numbers) == spec


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps m", "--steps m is no number on the engines"),
        ("--steps -n", "--steps -6 cannot work"),
        ("--steps 1.5", "--steps '1.5' is not a whole number"),
        ("--steps 6x", "--steps '6x' is not a whole number"),
        ("--steps n n", "%%fsdp_train does not take 'n'"),
        ("--eval-every 2.5", "--eval-every '2.5' is not a whole number"),
    ],
)
def test_what_stands_for_no_number_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line, TrainSpec, magic="%%fsdp_train", numbers=numbers)
    assert message in str(caught.value)


def test_numbers_are_asked_for_only_where_a_name_is_typed() -> None:
    def never(flag: str, expression: str) -> float:
        raise AssertionError(flag)

    line = "--data n --steps 3 --loss sum --eval-data n --eval-every epoch --after-step n -o n"
    assert parse(line, TrainSpec, magic="%%fsdp_train", numbers=never).steps == 3


def test_a_magic_without_options_says_so() -> None:
    assert "it takes no options" in refused("--all", EmptySpec, "%fsdp_status")


@pytest.mark.parametrize("name", ['nets["G"]', "nets['G']", "trainer.model", "nets[0]", "f(x)"])
def test_a_name_is_an_expression_and_keeps_its_quotes(name: str) -> None:
    assert train(f"--data {name} --steps 1").data == name
    assert train(f"--data={name}").data == name
    assert parse(f"{name} other", ModelSpec, magic="%%fsdp_model").names == (name, "other")


def test_quotes_around_a_whole_word_are_the_shells() -> None:
    assert parse("--ranks '0,1'", RunSpec, magic="%%fsdp").ranks == "0,1"
    assert parse('--memory-limit "2 GiB"', InitSpec, magic="%fsdp_init").memory_limit == "2 GiB"


@pytest.mark.parametrize(
    "line", ["--steps 3 # --accumulate 2", "--steps 3 #", "--steps 3  #it's unfinished"]
)
def test_a_comment_ends_the_line(line: str) -> None:
    assert train(line) == TrainSpec(steps=3)


def test_a_hash_inside_a_word_or_quotes_is_no_comment() -> None:
    assert train("--data data#1").data == "data#1"
    assert parse("'#x' y", PullSpec, magic="%fsdp_pull").names == ("#x", "y")


def test_defaults_stand_only_where_nothing_is_typed() -> None:
    defaults = InitSpec(strategy="shard_grad_op", compile=True, wrap="none")

    def model(line: str) -> ModelSpec:
        return parse(line, ModelSpec, magic="%%fsdp_model", completed=defaults.completed)

    assert model("") == ModelSpec(strategy="shard_grad_op", compile=True, wrap="none")
    assert model("--strategy full_shard").strategy == "full_shard"
    assert model("--strategy full_shard").wrap == "none"
    assert not model("--no-compile").compile


@pytest.mark.parametrize(
    ("line", "spec"),
    [
        ("", ModelSpec(strategy="hybrid_shard", shard_size=2, cpu_offload=True)),
        ("--shard-size 4", ModelSpec(strategy="hybrid_shard", shard_size=4, cpu_offload=True)),
        ("--strategy fsdp", ModelSpec(strategy="full_shard", cpu_offload=True)),
        ("--strategy ddp", ModelSpec(strategy="ddp")),
        (
            "--strategy HYBRID_SHARD --no-cpu-offload",
            ModelSpec(strategy="hybrid_shard", shard_size=2),
        ),
    ],
)
def test_a_model_of_another_strategy_does_not_take_what_is_for_the_sessions(
    line: str, spec: ModelSpec
) -> None:
    defaults = InitSpec(strategy="hybrid_shard", shard_size=2, cpu_offload=True)
    assert parse(line, ModelSpec, magic="%%fsdp_model", completed=defaults.completed) == spec


@pytest.mark.parametrize(
    ("line", "spec"),
    [
        ("--bf16", ModelSpec(precision="bf16")),
        ("--fp16 model", ModelSpec(precision="fp16", names=("model",))),
        ("--mixed-precision no", ModelSpec()),
        ("--mixed_precision BF16", ModelSpec(precision="bf16")),
        ("--gradient_checkpointing", ModelSpec(activation_checkpointing="blocks")),
        ("--no-gradient-checkpointing", ModelSpec()),
        ("--fsdp-min-num-params 2_000", ModelSpec(wrap="size:2000")),
        ("--fsdp_min_num_params=1e6 m", ModelSpec(wrap="size:1000000", names=("m",))),
        ("--fsdp-transformer-layer-cls-to-wrap A,B", ModelSpec(wrap="A,B")),
        ("--activation-checkpointing", ModelSpec(activation_checkpointing="blocks")),
        (
            "--activation-checkpointing Selective net",
            ModelSpec(activation_checkpointing="selective", names=("net",)),
        ),
        (
            "--activation-checkpointing net",
            ModelSpec(activation_checkpointing="blocks", names=("net",)),
        ),
        ("--activation-checkpointing=BLOCKS", ModelSpec(activation_checkpointing="blocks")),
    ],
)
def test_what_people_type_for_strategies_by_habit_is_taken(line: str, spec: ModelSpec) -> None:
    assert parse(line, ModelSpec, magic="%%fsdp_model") == spec


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--bf16 --precision fp16", "--bf16 and --precision are one option; give one of them"),
        ("--compile --no-compile", "--compile and --no-compile are one option"),
        ("--bf16=true", "--bf16 takes no value"),
        ("--no-compile=1", "--no-compile takes no value"),
        ("--fsdp-min-num-params", "--fsdp-min-num-params needs a value: --fsdp-min-num-params N"),
        ("--fsdp-min-num-params many", "--wrap size:many cannot work"),
        ("--activation-checkpointing=all", "'all' is not known; it takes blocks, selective"),
        ("--precision int8", "--precision 'int8' is not known"),
        ("--shard-size 2", "--shard-size is for --strategy hybrid_shard, and this is full_shard"),
        ("--strategy zero1 --cpu-offload", "zero1 makes none; use it with --strategy full_shard"),
        ("--accumulate-sync often", "it takes every, last"),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_line(
    line: str, message: str
) -> None:
    assert message in refused(line, ModelSpec, "%%fsdp_model")


def test_batchnorm_over_ranks_is_refused_on_cpu_engines() -> None:
    message = refused("--device cpu --sync-batchnorm", InitSpec, "%fsdp_init")
    assert "--sync-batchnorm needs GPUs" in message
    assert "micro-batch" in message


def test_values_match_choices_in_any_case() -> None:
    assert parse("--strategy FULL_SHARD", ModelSpec, magic="m").strategy == "full_shard"


def test_help_shows_every_option_and_its_choices() -> None:
    text = options_text(InitSpec)
    for flag in ("-n N", "--device DEVICE", "--memory-limit SIZE", "--restart"):
        assert flag in text
    assert "(one of auto, cuda, cpu; default auto)" in " ".join(text.split())
    assert "(default 0)" in text
    assert "--activation-checkpointing [WHAT]" in text
    assert "n=None" in keywords_text(InitSpec)


def test_help_says_what_is_for_engines_before_what_is_for_models() -> None:
    text = options_text(InitSpec)
    assert text.index("-n N") < text.index("--restart") < text.index("--strategy")
    assert options_text(ModelSpec).lstrip().startswith("NAME…")


def test_help_is_aligned_and_goes_on_under_its_own_column() -> None:
    lines = options_text(TrainSpec).splitlines()
    column = lines[0].index("a data set")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    assert any(line[:column].isspace() for line in lines)


def test_functions_show_the_options_as_keywords_and_in_their_help() -> None:
    for function, spec in ((init, InitSpec), (Session.train, TrainSpec), (Session.eval, EvalSpec)):
        keywords = inspect.signature(function).parameters
        wanted = options_of(spec).keys() - {"output"}
        assert wanted <= keywords.keys()
        assert all(f"{name}=" in function.__doc__ for name in wanted)
        assert "options" not in keywords
