"""ENGINE: the verbs that move variables: bound here, sent away, read as numbers."""

from __future__ import annotations

import ast
import pickle
from typing import Any

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.protocol import NumberRequest, PullRequest, PushRequest
from fsdp_magic.core.reply import Reply
from fsdp_magic.engine.agreement import WorldAgreement
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.state import State
from fsdp_magic.engine.values import is_sharded, number_or_type, packed, whole

_PLAIN = (
    *(ast.Module, ast.Expr, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant),
    *(ast.Tuple, ast.List, ast.UnaryOp, ast.unaryop, ast.expr_context),
)


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

    A plain name may be bound on some ranks only; anything else is evaluated by all.

    Collective: every rank must call this, since a sharded tensor is gathered by all.
    """
    with engine.cell(engine.names_of_cells()), INTERRUPTS.allowed():
        value, missing = _looked_up(request.expression, engine.namespace)
        if WorldAgreement(engine.world).fewest([int(missing is None)]) != [1]:
            sent = _of_this_rank(value, missing, request) if request.wanted else None
        else:
            value = whole(value, limit_bytes=request.limit_bytes)
            sent = packed(value, limit_bytes=request.limit_bytes) if request.wanted else None
    return Reply(rank=engine.world.rank, report=sent)


def _looked_up(expression: str, names: dict[str, Any]) -> tuple[Any, Exception | None]:
    """Return the value of an expression, or why it has none here; of a call, it is raised.

    A call may be one that all ranks make together: nothing else may be done in its place.
    """
    try:
        return eval(expression, names), None
    except Exception as error:  # whatever the person's objects raise
        if isinstance(error, SyntaxError) or not _is_plain(expression):
            raise
        return None, error


def _is_plain(expression: str) -> bool:
    return all(isinstance(node, _PLAIN) for node in ast.walk(ast.parse(expression)))


def _of_this_rank(value: Any, missing: Exception | None, request: PullRequest) -> bytes:
    """Return a value that other ranks lack.

    Raises:
        FsdpError: if it cannot be gathered without them.
    """
    if missing is not None:
        raise missing
    if is_sharded(value):
        raise FsdpError(
            f"{request.expression} is sharded and not there on every rank; bind it on all of "
            "them, in a %%fsdp cell"
        )
    return packed(whole(value, limit_bytes=request.limit_bytes), limit_bytes=request.limit_bytes)


def number(engine: State, request: NumberRequest) -> Reply:
    """Evaluate an expression; the report is a number, or the name of what is none.

    Collective: every rank must call this.
    """
    with engine.cell(engine.names_of_cells()), INTERRUPTS.allowed():
        found = number_or_type(eval(request.expression, engine.namespace))
    return Reply(rank=engine.world.rank, report=found)
