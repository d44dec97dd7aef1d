"""KERNEL: variables of the engines: sent there, brought back, read as numbers."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Mapping
from typing import Any

from fsdp_magic.core.errors import CellFailedError, UsageError
from fsdp_magic.core.protocol import NumberRequest, PullRequest, PushRequest
from fsdp_magic.core.reply import Reply
from fsdp_magic.core.units import GIB
from fsdp_magic.core.wording import as_typed
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.screen import Nowhere

PULL_LIMIT_BYTES = GIB


def push(engines: Engines, variables: Mapping[str, Any], *, world_size: int) -> None:
    """Bind variables on every rank.

    Raises:
        UsageError: if one cannot be pickled.
    """
    sent = {}
    for name, value in variables.items():
        try:
            sent[name] = pickle.dumps(value)
        except Exception as error:  # whatever an object's own pickling raises
            raise UsageError(
                f"{name} cannot be sent to the engines ({error}); make it there, in a %%fsdp cell"
            ) from None
    _ask(engines, "push", dict.fromkeys(range(world_size), PushRequest(variables=sent)))


def pull(engines: Engines, expression: str, *, rank: int | str, yes: bool, world_size: int) -> Any:
    """Return the value of an expression on a rank, or of all ranks as a list; see ``Session``.

    Raises:
        UsageError: if there is no such rank, or the value cannot be read here.
    """
    if rank != "all" and str(rank) not in map(str, range(world_size)):
        raise UsageError(
            f"--rank {as_typed(str(rank))} does not exist; this world has ranks 0 to "
            f"{world_size - 1}, or all"
        )
    _check_syntax(expression)
    limit = None if yes else PULL_LIMIT_BYTES
    requests = {
        r: PullRequest(
            expression=expression, wanted=rank == "all" or r == int(rank), limit_bytes=limit
        )
        for r in range(world_size)
    }
    replies = _ask(engines, "pull", requests)
    sent = [replies[r].report for r in sorted(replies) if replies[r].report]
    values = [_unpacked(value, expression) for value in sent]
    return values if rank == "all" else values[0]


def number(engines: Engines, flag: str, expression: str, *, world_size: int) -> float:
    """Return the number that an option's value stands for on the engines.

    Raises:
        UsageError: if it is no number there, or not the same one on every rank.
    """
    request = NumberRequest(expression=expression)
    try:
        replies = _ask(engines, "number", dict.fromkeys(range(world_size), request))
    except CellFailedError as error:
        reason = next(iter(error.exceptions.values())).message
        raise UsageError(
            f"{flag} {expression} is no number on the engines ({reason}); type a number, or "
            "bind the name in a %%fsdp cell"
        ) from None
    values = [replies[rank].report for rank in sorted(replies)]
    wrong = [value for value in values if isinstance(value, str)]
    if wrong:
        raise UsageError(f"{flag} {expression} is a {wrong[0]} on the engines; it must be a number")
    if len(set(values)) > 1:
        raise UsageError(
            f"{flag} {expression} differs between the ranks ({', '.join(map(str, values))}); it "
            "must be the same number on all"
        )
    found: float = values[0]
    return found


def _check_syntax(expression: str) -> None:
    """Raise if an expression is not Python; ``net.0`` is how torch names what is ``net[0]``."""
    if _is_python(expression):
        return
    meant = re.sub(r"\.(\d+)", r"[\1]", expression)
    hint = f"write {meant}" if _is_python(meant) else "it takes an expression, such as model.weight"
    raise UsageError(f"{as_typed(expression)} is not Python; {hint}")


def _is_python(expression: str) -> bool:
    try:
        ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _ask(engines: Engines, verb: str, requests: Mapping[int, Any]) -> dict[int, Reply]:
    """Ask ranks without showing what they print."""
    return engines.ask(verb, requests, screen=Nowhere())[0]


def _unpacked(sent: bytes, expression: str) -> Any:
    try:
        return pickle.loads(sent)
    except Exception as error:  # whatever an object's own unpickling raises
        raise UsageError(
            f"{expression} cannot be read in the notebook ({error}); pull a part of it, or "
            f"its text: repr({expression})"
        ) from None
