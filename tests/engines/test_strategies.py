"""Every way to spread a model equals one process, and any two options may be used together."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from architectures import ARCHITECTURES, in_one_process
from coverings import covering
from equality import GLOBAL_BATCH, STEPS, Trajectory, assert_equal

from fsdp_magic.notebook.session import Session

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "ddp", "hybrid_shard")
ENGINES = (2, 4, 1)
WRAPS = ("blocks", "size:1000", "class", "none")
ACCUMULATE = (1, 4)
CHECKPOINTING = (False, "blocks", "selective")
COMPILED = (False, True)
SYNC = ("every", "last")
# the compiler's own backend takes half a minute for each model
BACKEND = "from fsdp_magic.engine.parallel import compiling; compiling.BACKEND = {!r}"


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


def check(
    session: Session,
    name: str,
    *,
    strategy: str,
    accumulate: int,
    wrap: str,
    checkpointing: bool | str,
    compiled: bool,
    sync: str,
) -> None:
    """Train by these options and in one process, and compare."""
    engines = session.world_size
    options = options_of(name, strategy=strategy, engines=engines, wrap=wrap)
    options |= {"activation_checkpointing": checkpointing, "compile": compiled}
    parts = engines * accumulate if ARCHITECTURES[name].normalises else 1
    session.run(BACKEND.format("aot_eager"), show=False)
    try:
        measured = on_engines(session, name, accumulate=accumulate, accumulate_sync=sync, **options)
    finally:
        session.run(BACKEND.format("inductor"), show=False)
    assert_equal(measured, reference(name, parts), tolerance=1e-9)


@pytest.mark.parametrize(
    ("engines", "strategy", "name", "accumulate", "wrap", "checkpointing", "compiled", "sync"),
    covering(ENGINES, STRATEGIES, ARCHITECTURES, ACCUMULATE, WRAPS, CHECKPOINTING, COMPILED, SYNC),
)
def test_every_strategy_equals_one_process(
    world, engines, strategy, name, accumulate, wrap, checkpointing, compiled, sync
):
    check(
        world(engines),
        name,
        strategy=strategy,
        accumulate=accumulate,
        wrap=wrap,
        checkpointing=checkpointing,
        compiled=compiled,
        sync=sync,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("engines", ENGINES)
def test_any_options_together_equal_one_process(
    world, engines, strategy, accumulate, wrap, checkpointing, compiled
):
    check(
        world(engines),
        "heads",
        strategy=strategy,
        accumulate=accumulate,
        wrap=wrap,
        checkpointing=checkpointing,
        compiled=compiled,
        sync="every",
    )
