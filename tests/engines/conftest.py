"""Worlds of CPU engines that live through the whole run, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.errors import FsdpError
from fsdp_magic.notebook.session import Session

FRESH_NAMES = """
import builtins, gc
ours = builtins._fsdp_magic_call.__self__.world.names()
if not hasattr(builtins, "fsdp_magic_fresh_names"):  # an engine that lived through a restart
    builtins.fsdp_magic_fresh_names = frozenset(globals()) - set(ours) - {"ours"}
gc.collect()
gc.freeze()  # what is there already need not be searched before every test
"""
"""Run once on fresh engines."""

CLEAN = """
def clean():
    import builtins, gc, sys, torch
    from fsdp_magic.engine.position import Position
    from fsdp_magic.engine.randomness import TrainingRandomness, seed_all

    names = globals()
    for name in set(names) - builtins.fsdp_magic_fresh_names:
        del names[name]
    engine = builtins._fsdp_magic_call.__self__
    engine.models.clear()
    engine.lost_models.__init__(names)
    engine.names._told.clear()
    engine.steps, engine.epoch, engine.position = 0, 0, Position()
    seed = engine.world.request.seed
    engine._randomness = TrainingRandomness(seed, engine.world.rank)
    torch.set_default_dtype(torch.float32)
    seed_all(seed)
    gc.collect()

clean()
"""
"""Run before each test: as if the engines had just started."""


@pytest.fixture(scope="session")
def world(kept_sessions: list[Any]) -> Iterator[Callable[[int], Session]]:
    """Return a function: number of ranks -> a session that is kept alive until the end."""
    worlds: dict[int, Session] = {}

    def of(n: int) -> Session:
        if n not in worlds:
            worlds[n] = Session(InitSpec(n=n, device="cpu"))
            kept_sessions.append(worlds[n])
            worlds[n].run(FRESH_NAMES, show=False)
        return worlds[n]

    yield of
    for session in worlds.values():
        session.shutdown()


def cleaned(session: Session) -> Session:
    """Return a kept session as if it had just started; one that a test broke is restarted."""
    session.runs.clear()
    session._history.leave_engines()
    try:
        session.run(CLEAN, show=False, timeout=20)
    except FsdpError:
        session.restart()
        session.run(FRESH_NAMES, show=False)
        session.run(CLEAN, show=False)
    return session


@pytest.fixture
def session(world: Callable[[int], Session]) -> Session:
    """Two ranks, with nothing of earlier tests on them."""
    return cleaned(world(2))
