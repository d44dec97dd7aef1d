"""``hybrid_shard``: shards within groups of ranks, replicas between them; equal to one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
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
    single_process,
)

from fsdp_magic.errors import FsdpError
from fsdp_magic.notebook.session import Session

CASES = {"plain": Case(model=PLAIN, cell=PLAIN_CELL), "gpt2": Case(model=GPT2, cell=GPT2_CELL)}


@cache
def reference(case: Case) -> Trajectory:
    return single_process(case)


def on_engines(
    session: Session, case: Case, *, shard_size: int, accumulate: int = 1, **options: Any
) -> Trajectory:
    """Train on the engines of a session."""
    session.model(case.built, strategy="hybrid_shard", shard_size=shard_size, show=False, **options)
    trajectory = Trajectory(before=session.pull("dict(model.named_parameters())"))
    run = session.train(
        case.cell,
        data="data",
        steps=STEPS,
        no_shuffle=True,
        micro_batch_size=GLOBAL_BATCH // (session.world_size * accumulate),
        accumulate=accumulate,
        max_grad_norm=case.max_grad_norm,
        show=False,
    )
    trajectory.losses, trajectory.grad_norms = run.losses, run.grad_norms
    trajectory.after = session.pull("dict(model.named_parameters())")
    return trajectory


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
        shard_size=shard_size,
        accumulate=accumulate,
        accumulate_sync=sync,
    )
    assert_equal(measured, reference(CASES[case]), tolerance=1e-9)


def test_a_shard_size_that_does_not_divide_is_refused(session):
    with pytest.raises(FsdpError, match=r"--shard-size 3 does not divide 2 ranks; it takes 1, 2"):
        session.model(CASES["plain"].built, strategy="hybrid_shard", shard_size=3, show=False)
    with pytest.raises(FsdpError, match=r"all ranks are on one host; .*--shard-size N"):
        session.model(CASES["plain"].built, strategy="hybrid_shard", show=False)
