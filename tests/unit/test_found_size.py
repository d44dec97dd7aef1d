"""A size that was found: which training cells take it, and how much of it."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.notebook.found_size import FoundSize
from fsdp_magic.notebook.history import History


def found_size(**more: Any) -> FoundSize:
    return FoundSize(data="d", micro_batch_size=12, fits=12, **more)


def test_the_next_training_cell_on_the_same_data_takes_the_size_and_says_so() -> None:
    history = History()
    history.use(found_size())
    spec, note = history.sized(TrainSpec(data="d"), ranks=2)
    assert spec.micro_batch_size == 12
    assert note == "the micro-batch size is 12, from %fsdp_tune; --micro-batch-size sets it"


def test_a_global_batch_that_was_kept_is_handed_on() -> None:
    history = History()
    history.use(found_size(global_batch_size=96))
    spec, note = history.sized(TrainSpec(data="d"), ranks=2)
    assert (spec.micro_batch_size, spec.global_batch_size) == (12, 96)
    assert "and --global-batch-size 96 with it" in note
    spec, _ = history.sized(TrainSpec(data="d", accumulate=3), ranks=2)
    assert (spec.micro_batch_size, spec.accumulate, spec.global_batch_size) == (12, 3, None)
    spec, _ = history.sized(TrainSpec(data="d", global_batch_size=48), ranks=2)
    assert (spec.micro_batch_size, spec.global_batch_size) == (12, 48)


@pytest.mark.parametrize(
    "typed",
    [
        {"data": "e"},
        {"data": "d", "micro_batch_size": 4},
        {"data": "d", "tokens_per_batch": 99},
        {"steps": 3},
    ],
)
def test_other_training_cells_do_not(typed: dict[str, Any]) -> None:
    history = History()
    history.use(found_size())
    assert history.sized(TrainSpec(**typed), ranks=2) == (TrainSpec(**typed), "")


def test_a_new_model_or_new_engines_forget_the_size() -> None:
    for forget in (lambda h: h.start_anew(), lambda h: h.leave_engines(lost=False)):
        history = History()
        history.use(found_size())
        forget(history)
        assert history.sized(TrainSpec(data="d"), ranks=2)[1] == ""


@pytest.mark.parametrize(
    ("whole", "sharding", "size"),
    [(48, "auto", 12), (40, "auto", 10), (40, "none", 10), (14, "auto", 7), (74, "auto", 1)],
)
def test_a_global_batch_takes_the_largest_part_that_fits(
    whole: int, sharding: Any, size: int
) -> None:
    history = History()
    history.use(found_size())
    asked = TrainSpec(data="d", global_batch_size=whole, data_sharding=sharding)
    spec, note = history.sized(asked, ranks=2)
    assert spec.micro_batch_size == size
    assert ("that %fsdp_tune found" in note) == (size != 12), note


@pytest.mark.parametrize(
    ("accumulated", "training", "says"),
    [
        (False, {"accumulate": 4}, True),
        (False, {"global_batch_size": 48}, True),
        (False, {"global_batch_size": 24}, False),
        (False, {}, False),
        (True, {"accumulate": 4}, False),
    ],
)
def test_it_says_where_more_gradients_are_held_than_were_tried(
    accumulated: bool, training: dict[str, Any], says: bool
) -> None:
    history = History()
    history.use(found_size(accumulates=accumulated))
    _, note = history.sized(TrainSpec(data="d", **training), ranks=2)
    assert ("in steps of one micro-batch" in note) == says


@pytest.mark.parametrize(
    ("samples", "accumulate", "size"),
    [(None, 4, 12), (48, 4, 12), (47, 4, 11), (47, 1, 12), (5, 1, 5), (3, 4, 1)],
)
def test_a_step_of_it_is_no_more_than_the_data_have(
    samples: int | None, accumulate: int, size: int
) -> None:
    found = found_size(samples=samples)
    spec, note = found.sized(TrainSpec(data="d", accumulate=accumulate), ranks=2)
    assert (spec.micro_batch_size, spec.accumulate) == (size, accumulate)
    times = f"{accumulate} times" if accumulate > 1 else "once"
    assert (f"as the data fill {times}" in note) == (size != 12), note


def test_who_runs_out_of_memory_is_told_what_fits() -> None:
    found, spec = found_size(), TrainSpec(data="d")
    assert found.known_to_fit(spec, 13).endswith("12 fits: --micro-batch-size 12.")
    assert "more is held on the devices now" in found.known_to_fit(spec, 12)
    assert found.known_to_fit(spec, None) == found.known_to_fit(TrainSpec(data="e"), 13) == ""
    history = History()
    assert history.known_to_fit(spec, 13) == ""
    history.use(found)
    assert history.known_to_fit(spec, 13) == found.known_to_fit(spec, 13)
