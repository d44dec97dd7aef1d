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
        offers: values that Tab offers where others are allowed, too.
        alone: the value that the flag means without one, if it may stand alone; the next word is
            its value only if that is one of its choices.
        habits: other names for the flag that people type by habit.
        shorthands: flags that say it with a value: ``--bf16`` is ``bf16``; of one whose value
            holds ``{}``, the value typed after it is put there. None: the flag turns it off.
        many: whether it takes every positional word.
        completes: whose names Tab offers as its value: variables of the engines or of the
            notebook, or the ranks.
        listed: words that stand between the commas of its value.
        added: words that stand behind a plus sign of one of those.
    """

    flags: tuple[str, ...]
    help: str
    takes: str = ""
    choices: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    alone: str = ""
    habits: tuple[str, ...] = ()
    shorthands: tuple[tuple[str, str | None], ...] = ()
    many: bool = False
    completes: Completes = ""
    listed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


def option(
    *flags: str,
    default: Any,
    help: str,
    takes: str = "",
    choices: tuple[str, ...] = (),
    offers: tuple[str, ...] = (),
    alone: str = "",
    habits: tuple[str, ...] = (),
    shorthands: tuple[tuple[str, str | None], ...] = (),
    many: bool = False,
    completes: Completes = "",
    listed: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field that carries its ``Option``."""
    declared = Option(
        flags=flags,
        help=help,
        takes=takes,
        choices=choices,
        offers=offers,
        alone=alone,
        habits=habits,
        shorthands=shorthands,
        many=many,
        completes=completes,
        listed=listed,
        added=added,
    )
    return dataclasses.field(default=default, metadata={"option": declared})


def again(spec: type[Any], name: str) -> Any:
    """Return a field with the option of another spec, whose default means that it is not given."""
    (field,) = (each for each in dataclasses.fields(spec) if each.name == name)
    return dataclasses.field(default=None, metadata=dict(field.metadata))


def options_of(spec: type[Any]) -> dict[str, Option]:
    """Return the options of a spec by field name, in the order that a person reads them.

    That is: what is positional; then in the order of the fields, or a spec's own before those it
    inherits where it says ``inherited_last``.
    """
    declared = {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(spec)
        if "option" in field.metadata
    }
    own = spec.__annotations__ if getattr(spec, "inherited_last", False) else declared
    order = sorted(declared, key=lambda name: (not declared[name].many, name not in own))
    return {name: declared[name] for name in order}
