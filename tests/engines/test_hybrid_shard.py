"""``hybrid_shard``: shards within groups of ranks, replicas between them; equal to one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from equality import (
    GLOBAL_BATCH,
    GPT2,
    GPT2_CELL,
    PLAIN,
    PLAIN_CELL,
    STEPS,
    Case,
    Trajectory,
    assert_equal,
    on_engines,
    single_process,
)
from loops import check_weights

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.errors import CellFailedError, EngineDiedError, FsdpError
from fsdp_magic.notebook.session import Session

CASES = {"plain": Case(model=PLAIN, cell=PLAIN_CELL), "gpt2": Case(model=GPT2, cell=GPT2_CELL)}


@cache
def reference(case: Case) -> Trajectory:
    return single_process(case)


@pytest.mark.parametrize(
    ("engines", "shard_size", "accumulate", "sync", "case"),
    [
        (4, 2, 2, None, "plain"),
        (4, 2, 2, "last", "gpt2"),
        (2, 1, 1, None, "plain"),
        (2, 2, 2, None, "plain"),
    ],
)
def test_training_equals_one_process(world, engines, shard_size, accumulate, sync, case):
    measured = on_engines(
        world(engines),
        CASES[case],
        strategy="hybrid_shard",
        shard_size=shard_size,
        accumulate=accumulate,
        accumulate_sync=sync,
    )
    assert_equal(measured, reference(CASES[case]), tolerance=1e-9)


MANUAL = """
x, y = batch
loss = (model(x) - y).pow(2).mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""
FAIL = "if rank == 1: raise ValueError('stop')\nimport torch.distributed as dist; dist.barrier()"

DIES = "\nimport os\nif rank == 2 and step == 4: os.kill(os.getpid(), 9)\n"


@pytest.mark.parametrize("shard_size", [1, 2])
def test_a_manual_step_after_a_failed_cell_has_the_mean_gradient(session, shard_size):
    case = CASES["plain"]
    session.model(case.built, strategy="hybrid_shard", shard_size=shard_size, show=False)
    with pytest.raises(CellFailedError):  # every transport is replaced, those of the mesh too
        session.run(FAIL, show=False)
    session.train(
        MANUAL,
        data="data",
        steps=STEPS,
        no_shuffle=True,
        micro_batch_size=GLOBAL_BATCH // 2,
        manual=True,
        show=False,
    )
    expected = reference(case)
    check_weights(
        session,
        {f"model.{name}": value for name, value in expected.before.items()},
        {f"model.{name}": value for name, value in expected.after.items()},
    )


@pytest.mark.nightly
def test_the_mesh_is_made_again_for_a_fresh_engine_and_a_snapshot_goes_back(world):
    case, session = CASES["plain"], Session(InitSpec(n=4, device="cpu"))
    options = {"micro_batch_size": 2, "accumulate": 2, "no_shuffle": True, "show": False}
    try:
        built = {"strategy": "hybrid_shard", "shard_size": 2, "show": False}
        session.model(case.built, **built)
        with pytest.raises(EngineDiedError):
            session.train(case.cell + DIES, data="data", steps=STEPS, snapshot_every=3, **options)
        session.restart()
        session.model(case.built, **built)
        run = session.train(case.cell, data="data", resume=True, **options)
        assert run.losses == pytest.approx(reference(case).losses[3:], rel=1e-9)
        after = session.pull("dict(model.named_parameters())")
    finally:
        session.shutdown()
    for name, value in reference(case).after.items():
        torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-12)


def test_the_placement_says_which_ranks_share_a_copy(session):
    built = {"strategy": "hybrid_shard", "show": False}
    replicas = session.model(CASES["plain"].built, shard_size=1, **built)
    shards = session.model(CASES["plain"].built, shard_size=2, **built)
    assert (replicas.replicas, shards.replicas) == (2, 1)
    assert {p.kind for p in replicas.parameters} == {"replicated"}
    assert "sharded" in {p.kind for p in shards.parameters}
    for placement, copies in ((replicas, 2), (shards, 1)):
        assert sum(placement.local_bytes) - 2 * 8 == copies * (placement.global_bytes - 8)
    held = session.pull(
        "{n: tuple(getattr(p, '_local_tensor', p).shape) for n, p in model.named_parameters()}",
        rank="all",
    )
    for parameter in shards.parameters:
        assert [ranks[parameter.name] for ranks in held] == list(parameter.local_shapes)


def test_a_shard_size_that_does_not_divide_is_refused(session):
    with pytest.raises(FsdpError, match=r"--shard-size 3 does not divide 2 ranks; it takes 1, 2"):
        session.model(CASES["plain"].built, strategy="hybrid_shard", shard_size=3, show=False)
    with pytest.raises(FsdpError, match=r"all ranks are on one host; .*--shard-size N"):
        session.model(CASES["plain"].built, strategy="hybrid_shard", show=False)
