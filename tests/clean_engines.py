"""What makes kept engines as fresh as if they had just started."""

from __future__ import annotations

from fsdp_magic.errors import FsdpError
from fsdp_magic.notebook.session import Session

FRESH_NAMES = """
import builtins, gc, sys
if not hasattr(builtins, "fsdp_magic_fresh_names"):
    ours = builtins._fsdp_magic_call.__self__.world.names()
    builtins.fsdp_magic_fresh_names = frozenset(globals()) - set(ours) - {"ours"}
    gc.collect()
    gc.freeze()  # what is there already need not be searched before every test
    builtins.fsdp_magic_modules = len(sys.modules)
"""
"""Run once on fresh engines; an engine that has been through it is left as it is."""

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
    engine.lost_models.clear()
    engine.names._told.clear()
    engine.steps, engine.epoch, engine.position = 0, 0, Position()
    engine.snapshots.forget()
    engine.restoration.forget()
    seed = engine.world.request.seed
    engine._randomness = TrainingRandomness(seed, engine.world.rank)
    torch.set_default_dtype(torch.float32)
    seed_all(seed)
    gc.collect()
    if len(sys.modules) > builtins.fsdp_magic_modules:
        gc.freeze()  # what a test imported need not be searched before, and in, every later one
        builtins.fsdp_magic_modules = len(sys.modules)

clean()
"""
"""Run before each test: as if the engines had just started."""


def cleaned(session: Session) -> Session:
    """Return a kept session as if it had just started; one that a test broke is restarted."""
    session.runs.clear()
    session._history.leave_engines(lost=False)
    session._history.start_anew()
    session._history.lost_models = ()
    session.engines.weights.built(None)
    try:
        session.run(CLEAN, show=False, timeout=20)
    except FsdpError:
        session.restart()
        session.run(FRESH_NAMES, show=False)
        session.run(CLEAN, show=False)
    return session
