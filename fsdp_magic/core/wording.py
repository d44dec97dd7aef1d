"""How an error shows what was typed, and what was meant by it; pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 60
_ALIKE, _VALUE_ALIKE = 0.6, 0.7
"""``gpu`` is not ``cpu`` with a slip of the fingers."""


def quoted(value: object) -> str:
    """Return a value as an error shows it: on one line, what is unprintable escaped, not long."""
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 20]}…{text[-16:]}"


def as_typed(word: str) -> str:
    """Return a word as it was typed where it is short and printable; else quoted."""
    return word if word.isprintable() and len(word) <= _LONGEST else quoted(word)


def nearest(typed: str, known: Iterable[str], *, alike: float = _ALIKE) -> str | None:
    """Return the known word that was probably meant.

    Args:
        typed: what was typed.
        known: the words there are.
        alike: how like it must be, from 0 to 1; a word that begins with ``typed`` always counts.
    """
    words = list(known)
    found = difflib.get_close_matches(typed[:_LONGEST], words, n=1, cutoff=alike)
    if found:
        return found[0]
    longer = [word for word in words if len(typed.strip("-")) > 1 and word.startswith(typed)]
    return min(longer, key=len, default=None)


def suggestion(typed: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest value, with a space behind it; or nothing."""
    near = nearest(typed, known, alike=_VALUE_ALIKE)
    return "" if near is None else f"did you mean {near}? "
