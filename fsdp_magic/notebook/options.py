"""KERNEL: a magic's line -> a spec; a spec -> the magic's help.

No abbreviations, and an unknown option is an error that names the nearest one. On a line, `` #``
outside quotes starts a comment.
"""

from __future__ import annotations

import ast
import difflib
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import Option, options_of

SpecT = TypeVar("SpecT")
Numbers = Callable[[str, str], float]
"""(flag, expression) -> the number it stands for on the engines."""


def parse(
    line: str, spec: type[SpecT], *, magic: str, numbers: Numbers | None = None, **defaults: Any
) -> SpecT:
    """Return the spec that a magic's line asks for.

    Args:
        line: what was typed after the magic's name.
        spec: the dataclass that declares the options.
        magic: the magic's name, for errors.
        numbers: looks up a number that is given by its name on the engines; None: there are none.
        **defaults: values of fields that are not typed.

    Raises:
        UsageError: if an option is unknown, lacks its value, or has one that cannot work.
    """
    values = {**defaults, **_values(line, spec, magic)}
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
            raise UsageError(f"{flag} {value!r} is not a {wanted}")
        found[name] = numbers(flag, value)
    return found


def help_text(spec: type[Any]) -> str:
    """Return the options of a spec as aligned lines of help."""
    rows = [(_usage(option), option) for option in options_of(spec).values()]
    width = max((len(usage) for usage, _ in rows), default=0)
    return "\n".join(f"  {usage:<{width}}  {_described(option)}" for usage, option in rows)


def _values(line: str, spec: type[Any], magic: str) -> dict[str, Any]:
    options = options_of(spec)
    kinds = typing.get_type_hints(spec)
    flags = {
        _normal(flag): name
        for name, option in options.items()
        for flag in (*option.flags, *option.habits)
    }
    positional = next((name for name, option in options.items() if option.many), None)
    values: dict[str, Any] = {}
    words = _words(line, magic)
    for word in words:
        if not word.startswith("-") or word == "-":
            if positional is None:
                raise UsageError(f"{magic} does not take {word!r}; it takes {_known(options)}")
            values[positional] = (*values.get(positional, ()), word)
            continue
        flag, has_value, value = word.partition("=")
        name = flags.get(_normal(flag))
        if name is None:
            raise UsageError(_unknown(magic, flag, flags, options))
        if name in values:
            raise UsageError(f"{magic}: {flag} is given twice; give it once")
        values[name] = _value(options[name], kinds[name], flag, value if has_value else None, words)
    return values


def _value(option: Option, kind: Any, flag: str, value: str | None, words: Iterator[str]) -> Any:
    """Return the value of a flag, from behind its ``=`` or from the next word."""
    if not option.takes:
        if value is not None:
            raise UsageError(f"{flag} takes no value; leave out ={value}")
        return True
    if value is None:
        value = next(words, None)
    if value is None or (value.startswith("--")):
        raise UsageError(f"{flag} needs a value: {flag} {option.takes}")
    return _converted(value, kind)


def _converted(value: str, kind: Any) -> Any:
    """Return a number where one is taken and the text is one; else the text."""
    kinds = _kinds(kind)
    for number in (int, float):
        if number in kinds:
            try:
                return number(value)
            except ValueError:
                continue
    return value


def _kinds(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _takes_number(kind: Any) -> bool:
    return not {int, float}.isdisjoint(_kinds(kind))


def _is_expression(text: str) -> bool:
    """Return whether a text is Python that may stand for a number, but is none itself."""
    try:
        body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    while isinstance(body, ast.UnaryOp):
        body = body.operand
    return not isinstance(body, ast.Constant)


def _words(line: str, magic: str) -> Iterator[str]:
    """Split a line as a shell would, but keep quotes inside a word: nets["G"] is a name."""
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        for word in lexer:
            if word.startswith("#"):
                break
            words.append(_unquoted(word))
    except ValueError as error:
        raise UsageError(f"{magic}: {error} in {line!r}") from None
    return iter(words)


def _unquoted(word: str) -> str:
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if quoted else word


def _normal(flag: str) -> str:
    """Return a flag with dashes for underscores; short flags keep their case."""
    return flag.replace("_", "-").lower() if flag.startswith("--") else flag


def _unknown(magic: str, flag: str, flags: dict[str, str], options: dict[str, Option]) -> str:
    near = difflib.get_close_matches(_normal(flag), flags, n=1)
    hint = f"; did you mean {options[flags[near[0]]].flags[0]}?" if near else ""
    return (
        f"{magic} has no option {flag}{hint} It takes {_known(options)}"
        if hint
        else (f"{magic} has no option {flag}; it takes {_known(options)}")
    )


def _known(options: dict[str, Option]) -> str:
    names = [option.flags[0] for option in options.values() if option.flags]
    return ", ".join(names) if names else "no options"


def _usage(option: Option) -> str:
    if option.many:
        return f"{option.takes}…"
    return " ".join(filter(None, (option.flags[0], option.takes)))


def _described(option: Option) -> str:
    return option.help + (f" ({', '.join(option.choices)})" if option.choices else "")
