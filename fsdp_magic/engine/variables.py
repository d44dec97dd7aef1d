"""ENGINE: the verbs that move variables: bound here, sent away, read as numbers."""

from __future__ import annotations

import pickle

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.protocol import NumberRequest, PullRequest, PushRequest, Reply
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.state import State
from fsdp_magic.engine.values import number_or_type, packed, whole


def push(engine: State, request: PushRequest) -> Reply:
    """Bind variables."""
    for name, sent in request.variables.items():
        try:
            engine.namespace[name] = pickle.loads(sent)
        except Exception as error:  # whatever an object's own unpickling raises
            raise FsdpError(
                f"{name} cannot be read on the engines ({error}); define its class there, in a "
                "file or a %%fsdp cell"
            ) from None
    return Reply(rank=engine.world.rank)


def pull(engine: State, request: PullRequest) -> Reply:
    """Evaluate an expression; the report is its value, whole, on the CPU, pickled.

    Collective: every rank must call this, since a sharded tensor is gathered by all.
    """
    with engine.cell(engine.names_of_cells()), INTERRUPTS.allowed():
        value = whole(eval(request.expression, engine.namespace), limit_bytes=request.limit_bytes)
        sent = packed(value, limit_bytes=request.limit_bytes) if request.wanted else None
    return Reply(rank=engine.world.rank, report=sent)


def number(engine: State, request: NumberRequest) -> Reply:
    """Evaluate an expression; the report is a number, or the name of what is none.

    Collective: every rank must call this.
    """
    with engine.cell(engine.names_of_cells()), INTERRUPTS.allowed():
        found = number_or_type(eval(request.expression, engine.namespace))
    return Reply(rank=engine.world.rank, report=found)
