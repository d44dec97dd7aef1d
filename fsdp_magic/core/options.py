"""How an option is declared: a dataclass field that knows how it is typed; pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Completes = Literal["", "engines", "notebook", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How one field of a spec is typed on a magic's line.

    Attributes:
        flags: ``--micro-batch-size``; empty for a positional argument.
        help: one line, lower case, with the unit.
        takes: a word for its value in help; empty for a flag without a value.
        choices: the values allowed, if they can be listed.
        habits: other names for the flag that people type by habit.
        many: whether it takes every positional word.
        completes: whose names Tab offers as its value: variables of the engines or of the
            notebook, or the ranks.
    """

    flags: tuple[str, ...]
    help: str
    takes: str = ""
    choices: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()
    many: bool = False
    completes: Completes = ""


def option(
    *flags: str,
    default: Any,
    help: str,
    takes: str = "",
    choices: tuple[str, ...] = (),
    habits: tuple[str, ...] = (),
    many: bool = False,
    completes: Completes = "",
) -> Any:
    """Return a dataclass field that carries its ``Option``."""
    declared = Option(
        flags=flags,
        help=help,
        takes=takes,
        choices=choices,
        habits=habits,
        many=many,
        completes=completes,
    )
    return dataclasses.field(default=default, metadata={"option": declared})


def options_of(spec: type[Any]) -> dict[str, Option]:
    """Return the options of a spec by field name, in order."""
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(spec)
        if "option" in field.metadata
    }
