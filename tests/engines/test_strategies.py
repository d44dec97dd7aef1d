"""Every way to spread a model equals one process, and any two options may be used together."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from architectures import ARCHITECTURES, in_one_process
from coverings import pairwise
from equality import GLOBAL_BATCH, STEPS, Trajectory, assert_equal

from fsdp_magic.notebook.session import Session

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "ddp", "hybrid_shard")
ENGINES = (1, 2, 4)
WRAPS = ("blocks", "size:1000", "class", "none")


@cache
def reference(name: str, parts: int) -> Trajectory:
    return in_one_process(ARCHITECTURES[name], parts=parts)


def options_of(name: str, *, strategy: str, engines: int, wrap: str) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": strategy}
    if strategy == "hybrid_shard":
        options["shard_size"] = max(1, engines // 2)
    options["wrap"] = ARCHITECTURES[name].block if wrap == "class" else wrap
    return options


def on_engines(session: Session, name: str, *, accumulate: int, **options: Any) -> Trajectory:
    architecture = ARCHITECTURES[name]
    session.model(architecture.code, show=False, **options)
    trajectory = Trajectory(before=session.pull("dict(model.named_parameters())"))
    run = session.train(
        architecture.cell,
        data="data",
        steps=STEPS,
        no_shuffle=True,
        micro_batch_size=GLOBAL_BATCH // (session.world_size * accumulate),
        accumulate=accumulate,
        show=False,
    )
    trajectory.losses, trajectory.grad_norms = run.losses, run.grad_norms
    trajectory.after = session.pull("dict(model.named_parameters())")
    return trajectory


@pytest.mark.timeout(120)
@pairwise(
    engines=ENGINES,
    strategy=STRATEGIES,
    name=ARCHITECTURES,
    accumulate=[1, 4],
    wrap=WRAPS,
    checkpointing=[False, "blocks", "selective"],
    compiled=[False, True],
    sync=["every", "last"],
)
def test_every_strategy_equals_one_process(
    world, engines, strategy, name, accumulate, wrap, checkpointing, compiled, sync
):
    session = world(engines)
    parts = engines * accumulate if ARCHITECTURES[name].normalises else 1
    options = options_of(name, strategy=strategy, engines=engines, wrap=wrap)
    options |= {"activation_checkpointing": checkpointing, "accumulate_sync": sync}
    if compiled:  # by the same road as the default's, without a compiler's half minute
        options["compile"] = True
    measured = on_engines(session, name, accumulate=accumulate, **options)
    assert_equal(measured, reference(name, parts), tolerance=1e-9)
