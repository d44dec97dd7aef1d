"""KERNEL: a magic's line that is still being typed: what its last word is to become."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fsdp_magic.core.options import Completes, Option, options_of
from fsdp_magic.core.specs import MAGICS, STRATEGY_HABITS
from fsdp_magic.notebook.options import flags_of, needs_value, normal, takes_value

_LINE = re.compile(r"\s*(?:[^%=]*=\s*)?(%%?fsdp\w*)\s(.*)", re.DOTALL)
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*(?:"|$)|'[^']*(?:'|$))+""")
_LONGEST_HELP = 56


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One word that may be typed. ``about``: what it is, in a few words."""

    text: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What may stand where the cursor is.

    Attributes:
        fragment: the word that has been begun.
        values: words that may stand there, and come before names.
        offers: words that may stand there, and come after names.
        completes: whose names may stand there, too.
        anything: whether a word that is not offered may stand there.
    """

    fragment: str
    values: tuple[Offer, ...] = ()
    offers: tuple[Offer, ...] = ()
    completes: Completes = ""
    anything: bool = False


def magic_of(line: str) -> str | None:
    """Return the magic of ours that a line begins with, as it is typed; None if there is none."""
    match = _LINE.match(f"{line} ")
    return match[1] if match and _spec(match[1]) is not None else None


def wanted_at(line: str) -> Wanted | None:
    """Return what may stand at the end of a line; None if no magic's options stand there.

    Args:
        line: what was typed, up to the cursor.
    """
    match = _LINE.match(line)
    spec = _spec(match[1]) if match else None
    if match is None or spec is None:
        return None
    words = [found[0] for found in _WORD.finditer(match[2])]
    if any(word.startswith("#") for word in words):
        return None
    fragment = words.pop() if words and not match[2][-1:].isspace() else ""
    options, flags = options_of(spec), flags_of(spec)
    waiting = _waiting_for_value(words, options, flags)
    if waiting is not None:
        return _value(waiting, fragment)
    last = flags.get(normal(words[-1])) if words else None
    if last is not None and options[last].alone:
        return _either(_value(options[last], fragment), _next_word(words, fragment, options, flags))
    if fragment.startswith("-") and "=" in fragment:
        flag, _, value = fragment.partition("=")
        name = flags.get(normal(flag))
        takes = name is not None and takes_value(options[name], flag)
        return _value(options[name], value) if name and takes else None
    return _next_word(words, fragment, options, flags)


def _spec(magic: str) -> type[Any] | None:
    """Return the spec of a magic; a cell magic answers to one percent sign too."""
    return MAGICS.get(magic) or MAGICS.get(f"%{magic}") or MAGICS.get(magic[1:])


def _waiting_for_value(
    words: list[str], options: dict[str, Option], flags: dict[str, str]
) -> Option | None:
    """Return the option whose value comes next."""
    waiting: Option | None = None
    for word in words:
        name = flags.get(normal(word)) if waiting is None else None
        waiting = options[name] if name is not None and needs_value(options[name], word) else None
    return waiting


def _either(value: Wanted, word: Wanted) -> Wanted:
    """Return what may stand behind an option whose value may be left out."""
    return Wanted(
        fragment=word.fragment,
        values=value.offers,
        offers=word.offers,
        completes=word.completes,
        anything=word.anything,
    )


def _value(option: Option, typed: str) -> Wanted:
    """Return what an option's value may be."""
    if option.listed:
        return _listed(option, typed)
    choices = [choice for choice in (*option.choices, *option.offers) if choice != option.takes]
    if option.flags[0] == "--strategy":
        choices += [habit for habit in STRATEGY_HABITS if typed]
    fitting = tuple(
        Offer(text=choice, about=option.flags[0])
        for choice in choices
        if choice.lower().startswith(typed.lower())
    )
    return Wanted(
        fragment=typed,
        offers=fitting,
        completes=option.completes,
        anything=len(choices) < len(option.choices) or not option.choices,
    )


def _listed(option: Option, typed: str) -> Wanted:
    """Return what may stand behind the last comma or plus sign of a list."""
    before, sign, last = re.match(r"(.*?)([,+]?)([^,+]*)$", typed).groups()  # type: ignore[union-attr]
    said = re.split(r"[,+]", before.rpartition(",")[2]) if sign == "+" else []
    words = option.added if sign == "+" else option.listed
    fitting = [word for word in words if word.startswith(last.lower()) and word not in said]
    offers = tuple(Offer(text=word, about=option.flags[0]) for word in fitting)
    return Wanted(fragment=last, offers=offers)


def _next_word(
    words: list[str], fragment: str, options: dict[str, Option], flags: dict[str, str]
) -> Wanted:
    """Return the options that are not given yet, and whose names may stand beside them."""
    given = {flags.get(normal(word.partition("=")[0])) for word in words}
    typed, own = normal(fragment), {o.flags[0] for o in options.values() if o.flags}
    fitting = [
        (flag, options[name])
        for flag, name in flags.items()
        if name not in given and flag.startswith(typed)
    ]
    offered = [(flag, option) for flag, option in fitting if flag in own]
    if not offered:  # what people type by habit is taken, and not taught
        offered = fitting
    positional = next((option for option in options.values() if option.many), None)
    named = positional is not None and not fragment.startswith("-")
    return Wanted(
        fragment=fragment,
        offers=tuple(Offer(text=flag, about=_about(option)) for flag, option in offered),
        completes=positional.completes if positional is not None and named else "",
        anything=named,
    )


def _about(option: Option) -> str:
    """Return the help of an option, short enough for a list."""
    first = re.split(r"[;:]| \(", option.help, maxsplit=1)[0]
    return first if len(first) <= _LONGEST_HELP else f"{first[: _LONGEST_HELP - 1]}…"
