"""Training on engines equals the plain loop of one process: AdamW, float32 and clipping.

``test_strategies.py`` has what comes first, float64 with SGD and without clipping: AdamW hides a
wrong gradient scale, and clipping hides it again.
"""

from __future__ import annotations

from functools import cache

import pytest
from equality import (
    ADAMW,
    GPT2,
    GPT2_CELL,
    PLAIN,
    PLAIN_CELL,
    Case,
    Trajectory,
    assert_equal,
    on_engines,
    single_process,
)

MODELS = {"gpt2-tied": (GPT2, GPT2_CELL), "plain": (PLAIN, PLAIN_CELL)}
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "ddp")


@cache
def reference(case: Case) -> Trajectory:
    return single_process(case)


def case_of(model: str, **options: object) -> Case:
    code, cell = MODELS[model]
    return Case(model=code, cell=cell, **options)


@pytest.mark.parametrize(
    ("engines", "strategy", "model"),
    [(2, "full_shard", "gpt2-tied"), (4, "shard_grad_op", "plain")],
)
def test_adamw_with_two_groups_equals_one_process(world, engines, strategy, model):
    case = case_of(model, optimizer=ADAMW, lr=1e-3)
    measured = on_engines(world(engines), case, accumulate=2, strategy=strategy)
    # AdamW divides by the gradient's own size, so rounding of a near-zero gradient grows
    assert_equal(measured, reference(case), tolerance=1e-7)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float32_equals_one_process_roughly(world, strategy):
    case = case_of("gpt2-tied", dtype="float32")
    measured = on_engines(world(2), case, accumulate=2, strategy=strategy)
    assert_equal(measured, reference(case), tolerance=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_equals_one_process(world, strategy):
    case = case_of("gpt2-tied", max_grad_norm=0.3)
    expected = reference(case)
    assert min(expected.grad_norms) > 0.3, "the case must clip at every step"
    measured = on_engines(world(2), case, accumulate=2, strategy=strategy)
    assert_equal(measured, expected, tolerance=1e-9)


def test_clipping_leaves_small_gradients_alone(world):
    free = case_of("plain")
    bounded = case_of("plain", max_grad_norm=1e6)
    assert_equal(on_engines(world(2), bounded), reference(free), tolerance=1e-9)


def test_tied_weights_stay_one_parameter(world):
    session = world(2)
    case = case_of("gpt2-tied")
    on_engines(session, case)
    assert session.pull("model.lm_head.weight is model.transformer.wte.weight", rank="all") == [
        True,
        True,
    ]
    names = [parameter.name for parameter in session.shards(show=False).parameters]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
