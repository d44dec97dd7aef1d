"""``--compile``: blocks are compiled in place, once for all that are alike, and nothing differs."""

from __future__ import annotations

from functools import cache

import pytest
from equality import PLAIN, PLAIN_CELL, STEPS, Case, Trajectory, assert_equal, single_process

from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import compiling
from fsdp_magic.errors import FsdpError

STRATEGIES = ("full_shard", "shard_grad_op", "ddp", "zero1")
MODELS = {"gpt2-tied": Case(), "plain": Case(model=PLAIN, cell=PLAIN_CELL)}
COUNT = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from fsdp_magic.engine.parallel import compiling
compiling.BACKEND = counter = CompileCounterWithBackend("aot_eager")
"""
"""What dynamo and autograd make of blocks is run as it is, without a compiler."""


@cache
def reference(case: Case) -> Trajectory:
    return single_process(case)


def on_engines(session, case, *, accumulate=1, **options) -> Trajectory:
    session.model(case.built, compile=True, show=False, **options)
    trajectory = Trajectory(before=session.pull("dict(model.named_parameters())"))
    run = session.train(
        case.cell, data="data", steps=STEPS, no_shuffle=True, accumulate=accumulate,
        micro_batch_size=16 // session.world_size // accumulate, show=False,
    )  # fmt: skip
    trajectory.losses, trajectory.grad_norms = run.losses, run.grad_norms
    trajectory.after = session.pull("dict(model.named_parameters())")
    return trajectory


CASES = [
    pytest.param("full_shard", "gpt2-tied", "blocks"),
    *(
        pytest.param(strategy, model, checkpointing, marks=pytest.mark.nightly)
        for strategy in STRATEGIES
        for model in MODELS
        for checkpointing in (False, "blocks", "selective")
        if (strategy, model, checkpointing) != ("full_shard", "gpt2-tied", "blocks")
    ),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("strategy", "model", "checkpointing"), CASES)
def test_training_equals_one_process(session, strategy, model, checkpointing):
    case = MODELS[model]
    session.run(COUNT, show=False)
    try:
        measured = on_engines(
            session, case, strategy=strategy, activation_checkpointing=checkpointing
        )
        assert_equal(measured, reference(case), tolerance=1e-9)
        assert session.pull("counter.frame_count", rank="all") == [1, 1]  # one graph, no break
        names = {}
        exec(case.built, names)
        assert session.pull("list(model.state_dict())") == list(names["model"].state_dict())
        # another size of batch: once more, for every size; and then never again
        for size in (3, 5, 6, 7):
            session.train(case.cell, data="data", steps=1, micro_batch_size=size, show=False)
        assert session.pull("counter.frame_count", rank="all") == [2, 2]
    finally:
        session.run("compiling.BACKEND = 'inductor'", show=False)


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_blocks_compute_in_bf16_as_others_do(session, strategy):
    case = Case(model=PLAIN, cell=PLAIN_CELL, dtype="float32")
    session.run(COUNT, show=False)
    try:
        losses = []
        for compiled in (False, True):
            session.model(
                case.built, strategy=strategy, precision="bf16", compile=compiled, show=False
            )
            run = session.train(
                case.cell, data="data", steps=4, no_shuffle=True, micro_batch_size=8, show=False
            )
            losses.append(run.losses)
        assert losses[0] == losses[1]  # the same operations, by the same kernels
        assert session.pull("counter.frame_count", rank="all") == [1, 1]
    finally:
        session.run("compiling.BACKEND = 'inductor'", show=False)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checkpointing", [False, "blocks", "selective"])
def test_inductor_equals_one_process(session, checkpointing):
    case = Case(model=PLAIN, cell=PLAIN_CELL)
    measured = on_engines(session, case, activation_checkpointing=checkpointing)
    assert_equal(measured, reference(case), tolerance=1e-9)


def test_a_machine_without_a_compiler_is_told(monkeypatch):
    spec = ModelSpec(compile=True)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(FsdpError, match="needs a C\\+\\+ compiler, and there is none"):
        compiling.refuse_unfit(spec)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(FsdpError, match="CXX=/nowhere/g\\+\\+ is not there"):
        compiling.refuse_unfit(spec)
    compiling.refuse_unfit(ModelSpec())
