"""KERNEL: a magic's line, or the options of a call, -> a spec.

No abbreviations, and an unknown option is an error that names the nearest one, or the magic that
has it. On a line, `` #`` outside quotes starts a comment.
"""

from __future__ import annotations

import ast
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import Option, options_of
from fsdp_magic.core.specs import MAGICS
from fsdp_magic.core.wording import as_typed, nearest, quoted
from fsdp_magic.notebook.line_words import Words, split_line

SpecT = TypeVar("SpecT")
Numbers = Callable[[str, str], float]
"""(flag, expression) -> the number it stands for on the engines."""
Completed = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Values by field -> those, and what stands for the rest."""

_VALUES = frozenset(["true", "false", "yes", "no", "on", "off", "none", "all", "full", "auto"])
"""What people type behind flags that take no value, or another one."""
_FEW = 4
"""So many options are listed in an error; more are the help's business."""


def parse(
    line: str,
    spec: type[SpecT],
    *,
    magic: str,
    numbers: Numbers | None = None,
    completed: Completed = dict,
) -> SpecT:
    """Return the spec that a magic's line asks for.

    Args:
        line: what was typed after the magic's name.
        spec: the dataclass that declares the options.
        magic: the magic's name, for errors.
        numbers: looks up a number that is given by its name on the engines; None: there are none.
        completed: adds to what was typed what stands for the rest.

    Raises:
        UsageError: if an option is unknown, lacks its value, or has one that cannot work.
    """
    values = completed(_values(line, spec, magic))
    return spec(**looked_up(values, spec, numbers))


def looked_up(
    values: Mapping[str, Any], spec: type[Any], numbers: Numbers | None
) -> dict[str, Any]:
    """Return the values of fields, those of numbers given by name looked up on the engines.

    Raises:
        UsageError: if a text is neither a number nor a Python expression.
    """
    options, kinds = options_of(spec), typing.get_type_hints(spec)
    found = dict(values)
    for name, value in values.items():
        option = options.get(name)
        if option is None or not isinstance(value, str) or not _takes_number(kinds[name]):
            continue
        if value.lower() in option.choices:
            continue
        flag = option.flags[0]
        if numbers is None or not _is_expression(value):
            wanted = "number" if float in _kinds(kinds[name]) else "whole number"
            raise UsageError(f"{flag} {quoted(value)} is not a {wanted}")
        found[name] = numbers(flag, value)
    return found


def spec_of(
    options: Mapping[str, Any], spec: type[SpecT], *, call: str, numbers: Numbers | None = None
) -> SpecT:
    """Return the spec that the keywords of a call ask for.

    Args:
        options: the keywords.
        spec: the dataclass that declares them.
        call: the function's name, for errors.
        numbers: looks up a number that is given by its name on the engines; None: there are none.

    Raises:
        UsageError: if a keyword is unknown, or a value cannot work.
    """
    known = flags_of(spec)
    for name in options.keys() - options_of(spec).keys():
        near = nearest(f"--{name}".replace("_", "-"), known)
        hint = f"; did you mean {known[near]}?" if near else ";"
        raise UsageError(f"{call}() has no option {as_typed(name)}{hint} help({call}) lists all")
    return spec(**looked_up(options, spec, numbers))


def flags_of(spec: type[Any]) -> dict[str, str]:
    """Return the field behind every flag of a spec: its own flags first, then those of habit."""
    options = options_of(spec)
    own = {flag: name for name, option in options.items() for flag in option.flags}
    habits = {habit: name for name, option in options.items() for habit in option.habits}
    return (
        own
        | habits
        | {flag: name for name, option in options.items() for flag, _ in option.shorthands}
    )


def takes_value(option: Option, flag: str) -> bool:
    """Return whether a value may be typed after one of the flags of an option."""
    shorthands = dict(option.shorthands)
    if normal(flag) in shorthands:
        return "{}" in (shorthands[normal(flag)] or "")
    return bool(option.takes)


def needs_value(option: Option, flag: str) -> bool:
    """Return whether a value must be typed after one of the flags of an option."""
    return takes_value(option, flag) and not option.alone


def normal(flag: str) -> str:
    """Return a flag with dashes for underscores; short flags keep their case."""
    return flag.replace("_", "-").lower() if flag.startswith("--") else flag


def _values(line: str, spec: type[Any], magic: str) -> dict[str, Any]:
    options, flags = options_of(spec), flags_of(spec)
    kinds = typing.get_type_hints(spec)
    positional = next((name for name, option in options.items() if option.many), None)
    flag = ""
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}
    words = Words(split_line(line, magic))
    for word in words:
        if not word.startswith("-") or word == "-":
            if positional is None:
                raise UsageError(_misplaced(magic, word, spec))
            left, equals, value = word.partition("=")
            if equals and normal(f"--{left}") in flags:
                raise UsageError(
                    f"{magic}: {as_typed(word)} is no NAME; did you mean --{left} {value}?"
                )
            if words.before == flag and flag:
                _refuse_value(options[flags[normal(flag)]], flag, word)
            values[positional] = (*values.get(positional, ()), word)
            continue
        flag, has_value, value = word.partition("=")
        name = flags.get(normal(flag))
        if name is None:
            raise UsageError(_unknown(magic, flag, spec))
        if name in values:
            raise UsageError(_repeated(magic, typed[name], flag))
        typed[name] = flag
        values[name] = _value(options[name], kinds[name], flag, value if has_value else None, words)
    return values


def _refuse_value(option: Option, flag: str, word: str) -> None:
    """Raise if a NAME behind a flag that needs no value was probably meant as one.

    The cell would run before it turned out that the engines have no such model.
    """
    near = nearest(word.lower(), option.choices) if takes_value(option, flag) else None
    if word.lower() not in _VALUES and near is None:
        return
    meant = f"did you mean {near}? A" if near else "a"
    takes = f"takes {', '.join(option.choices)}" if takes_value(option, flag) else "takes no value"
    raise UsageError(
        f"{flag} {takes}; {as_typed(word)} cannot follow it; {meant} model of this name stands "
        f"before it: {as_typed(word)} {flag}"
    )


def _repeated(magic: str, first: str, second: str) -> str:
    if normal(first) == normal(second):
        return f"{magic}: {second} is given twice; give it once"
    return f"{magic}: {first} and {second} are one option; give one of them"


def _value(option: Option, kind: Any, flag: str, value: str | None, words: Words) -> Any:
    """Return the value of a flag, from behind its ``=`` or from the next word."""
    shorthands = dict(option.shorthands)
    said = shorthands.get(normal(flag), "{}")
    if not takes_value(option, flag):
        if value is not None:
            raise UsageError(f"{flag} takes no value; leave out ={as_typed(value)}")
        return True if said == "{}" else said or False
    if value is None and option.alone and words.coming.lower() not in option.choices:
        return option.alone
    if value is None:
        value = next(words, None)
    if not value or value.startswith("--"):
        takes = "N" if normal(flag) in shorthands else option.takes
        raise UsageError(f"{flag} needs a value: {flag} {takes}")
    return _converted(value if said is None else said.replace("{}", value), kind)


def _converted(value: str, kind: Any) -> Any:
    """Return a number where one is taken and the text is one; else the text."""
    kinds = _kinds(kind)
    for number in (int, float):
        if number in kinds:
            try:
                return number(value)
            except ValueError:  # no number, or one of thousands of digits
                continue
    return value


def _kinds(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _takes_number(kind: Any) -> bool:
    return not {int, float}.isdisjoint(_kinds(kind))


def _is_expression(text: str) -> bool:
    """Return whether a text is Python that may stand for a number, but is none itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape or a literal that Python will refuse
            body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    while isinstance(body, ast.UnaryOp):
        body = body.operand
    return not isinstance(body, ast.Constant)


def _unknown(magic: str, flag: str, spec: type[Any]) -> str:
    """Return the line that refuses an option which a magic has not."""
    typed, flags = normal(flag), flags_of(spec)
    others = [other for other, its in MAGICS.items() if typed in flags_of(its)]
    near = nearest(typed, flags)
    what = f"{magic} has no option {as_typed(flag)}"
    if others and not (near or "").startswith(typed):
        have = "has it" if len(others) == 1 else "have it"
        return f"{what}; {' and '.join(others[:2])} {have}{_all_options(magic, spec)}"
    return f"{what}{_meant(spec, near)}{_all_options(magic, spec, near)}"


def _misplaced(magic: str, word: str, spec: type[Any]) -> str:
    """Return the line that refuses a word which is no option, where a magic takes only options."""
    what = f"{magic} does not take {quoted(word)}"
    value = re.split(r"[,+]", word.lower())[0]
    for option in options_of(spec).values():
        if value in (*option.choices, *option.listed):
            return f"{what}; did you mean {option.flags[0]} {as_typed(word)}?"
    near = nearest(normal(f"--{word.partition('=')[0]}"), flags_of(spec))
    return f"{what}{_meant(spec, near)}{_all_options(magic, spec, near)}"


def _meant(spec: type[Any], near: str | None) -> str:
    """Return a question that names our flag for the nearest one; nothing without one."""
    if near is None:
        return ""
    return f"; did you mean {options_of(spec)[flags_of(spec)[near]].flags[0]}?"


def _all_options(magic: str, spec: type[Any], near: str | None = None) -> str:
    """Return the options of a magic where they are few; else where to read them."""
    own = [option.flags[0] for option in options_of(spec).values() if option.flags]
    if len(own) > _FEW:
        says = f"%{magic.lstrip('%')}? lists all options"
        return f"; {says}" if near is None else f" {says}"
    if near is not None:
        return f" It takes {', '.join(own)}" if len(own) > 1 else ""
    return f"; it takes {', '.join(own) or 'no options'}"
