"""What can be typed behind ``%fsdp_tune``, what it means, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_magic.core.specs import TrainSpec, TuneSpec
from fsdp_magic.errors import UsageError
from fsdp_magic.notebook.options import parse, spec_of


def tune(line: str) -> TuneSpec:
    return parse(line, TuneSpec, magic="%%fsdp_tune")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("", {}),
        ("--max 64 --margin 0 -o tuned", {"max": 64, "margin": 0.0, "output": "tuned"}),
        ("--max-batch-size 64", {"max": 64}),
        ("--max_micro_batch_size=64", {"max": 64}),
        ("--objective THROUGHPUT", {"objective": "throughput"}),
        ("--strategies ZeRO-3,ddp+bfloat16", {"strategies": ("full_shard", "ddp+bf16")}),
        (
            "--strategies full-shard+gradient-checkpointing+cpu-offload",
            {"strategies": ("full_shard+activation_checkpointing+cpu_offload",)},
        ),
        ("--dataset d --clip 1", {"data": "d", "max_grad_norm": 1.0}),
        ("--gradient-accumulation-steps 2", {"accumulate": 2}),
        ("--data-sharding none --no-shuffle", {"data_sharding": "none", "no_shuffle": True}),
        ("--manual --timeout 60", {"manual": True, "timeout": 60.0}),
    ],
)
def test_what_is_typed_is_what_is_meant(line: str, meant: dict[str, Any]) -> None:
    assert tune(line) == TuneSpec(**meant)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max 0", "--max 0 cannot work; it takes a whole number from 1"),
        ("--max many", "--max 'many' is not a whole number"),
        ("--objective speed", "--objective 'speed' is not known; it takes memory, throughput"),
        ("--objective trougput", "did you mean throughput? It takes memory, throughput"),
        ("--margin 5", "--margin 5.0 cannot work; it takes a share from 0 to below 1, such as"),
        ("--margin 1", "--margin 1.0 cannot work"),
        ("--margin -0.1", "--margin -0.1 cannot work"),
        ("--margin nan", "--margin nan cannot work"),
        ("--strategies ddp,dpd", "did you mean ddp?"),
        ("--strategies ddp,no_shard", "--strategies names ddp twice; name it once"),
        ("--strategies ddp:4", "only hybrid_shard has a size"),
        ("--accumulate 0", "--accumulate 0 cannot work; it takes a whole number from 1"),
        ("--global-batch-size 0", "--global-batch-size 0 cannot work"),
        ("--max-grad-norm 0", "--max-grad-norm 0.0 cannot work; it takes a number above 0"),
        ("--loss avg", "--loss 'avg' is not known; it takes mean, tokens, sum"),
        ("--data-sharding some", "--data-sharding 'some' is not known; it takes auto, none"),
        ("--timeout 0", "--timeout 0.0 cannot work; it takes a number above 0"),
        ("--accumulate 2 --global-batch-size 64", "sets --accumulate; give one of the two"),
        ("--manual --accumulate 2", "--accumulate is the cell's own business with --manual"),
        ("--manual --clip 1", "--max-grad-norm is the cell's own business with --manual"),
        ("-o 1x", "-o '1x' is not a name; give one such as -o tuned"),
        ("--margn 0.1", "did you mean --margin?"),
        ("--micro-batch-size 8", "has no option --micro-batch-size; %%fsdp_train and %%fsdp_eval"),
        ("--tokens-per-batch 4096", "has no option --tokens-per-batch; %%fsdp_train has it"),
        ("--steps 5", "has no option --steps; %%fsdp_train and %fsdp_compare have it"),
        ("--gpu-memory 24GiB", "has no option --gpu-memory; %%fsdp_plan has it"),
        ("ddp", "did you mean --strategies ddp?"),
        ("train_data", "did you mean --data?"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(line: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        tune(line)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_options_are_keywords_in_python() -> None:
    spec = spec_of({"max": 8, "strategies": ["ddp", "fsdp"]}, TuneSpec, call="session.tune")
    assert spec == TuneSpec(max=8, strategies=("ddp", "full_shard"))
    with pytest.raises(UsageError, match=r"session.tune\(\) has no option micro_batch_size; did"):
        spec_of({"micro_batch_size": 3}, TuneSpec, call="session.tune")
    with pytest.raises(UsageError, match="--data 3 cannot work; it takes a name, as text"):
        spec_of({"data": 3}, TuneSpec, call="session.tune")


LAST = TrainSpec(
    data="d", collate="pad", accumulate=2, max_grad_norm=1.0, loss="tokens", no_shuffle=True,
    timeout=9.0, scheduler_every="epoch", data_sharding="none",
)  # fmt: skip
STEP = {"steps": 1, "scheduler_every": "step"}


def test_a_cell_of_its_own_has_the_options_that_were_given() -> None:
    spec = TuneSpec(data="e", accumulate=3, loss="SUM")
    assert spec.training(None) == TrainSpec(data="e", accumulate=3, loss="sum", **STEP)


def test_the_last_cell_keeps_its_options() -> None:
    assert TuneSpec().training(LAST) == replaced(LAST)


@pytest.mark.parametrize(
    "given",
    [
        {"data": "e"},
        {"collate": "stack"},
        {"accumulate": 3},
        {"max_grad_norm": 0.5},
        {"loss": "mean"},
        {"data_sharding": "auto"},
        {"timeout": 3.0},
    ],
)
def test_what_is_given_beside_it_is_taken_instead(given: dict[str, Any]) -> None:
    assert TuneSpec(**given).training(LAST) == replaced(LAST, **given)


def replaced(spec: TrainSpec, **changes: Any) -> TrainSpec:
    """Return options with changes, for one step."""
    fields = {name: getattr(spec, name) for name in TrainSpec.__dataclass_fields__}
    return TrainSpec(**{**fields, "steps": 1, **changes})


def test_a_global_batch_and_an_accumulation_take_each_others_place() -> None:
    whole = TuneSpec(global_batch_size=64).training(LAST)
    assert (whole.global_batch_size, whole.accumulate) == (64, 1)
    counted = TuneSpec(accumulate=3).training(whole)
    assert (counted.global_batch_size, counted.accumulate) == (None, 3)
    assert TuneSpec().training(whole).global_batch_size == 64


def test_a_search_does_nothing_beside_its_steps() -> None:
    """What would last, or be seen from outside, is left out of the steps that are tried."""
    last = TrainSpec(
        data="d", micro_batch_size=4, epochs=3, eval_every=2, eval_data="v", snapshot_every=3,
        log="log", after_step="average", nan="stop", resume=True, output="run",
    )  # fmt: skip
    assert TuneSpec().training(last) == TrainSpec(data="d", **STEP)


@pytest.mark.parametrize(
    ("given", "last", "says"),
    [
        ({}, None, "so it needs data; add --data NAME"),
        ({}, TrainSpec(steps=3), "so it needs data; add --data NAME"),
        ({}, TrainSpec(data="d", tokens_per_batch=99), "takes --tokens-per-batch 99, and"),
        ({"accumulate": 2}, TrainSpec(data="d", manual=True), "own business with --manual"),
        ({"manual": True}, LAST, "own business with --manual"),
    ],
)
def test_a_cell_without_a_size_to_change_is_refused(
    given: dict[str, Any], last: TrainSpec | None, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        TuneSpec(**given).training(last)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_data_of_their_own_free_a_search_from_batches_of_tokens() -> None:
    last = TrainSpec(data="d", tokens_per_batch=99)
    assert TuneSpec(data="e").training(last) == TrainSpec(data="e", **STEP)


def test_a_scheduler_that_may_count_epochs_does_not_hold_a_search_up() -> None:
    assert TuneSpec(data="d").training(None).scheduler_every == "step"
    assert TuneSpec().training(LAST).scheduler_every == "epoch"
