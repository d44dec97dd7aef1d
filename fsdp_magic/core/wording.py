"""How an error shows what was typed, and what was meant by it; pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 60
_ALIKE = 0.8
"""``stepz`` is ``steps`` with a slip of the fingers; ``gpu`` is not ``cpu``."""


def quoted(value: object) -> str:
    """Return a value as an error shows it: on one line, what is unprintable escaped, not long."""
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 20]}…{text[-16:]}"


def as_typed(word: str) -> str:
    """Return a word as it was typed where it is short and printable; else quoted."""
    return word if word.isprintable() and len(word) <= _LONGEST else quoted(word)


def nearest(typed: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant.

    That is one which differs by a slip of the fingers, has the same letters in another order,
    begins with what was typed, or holds its parts: ``gpus`` for ``--share-gpus``.
    """
    bare = {word.strip("-"): word for word in reversed(list(known))}
    begun = typed.strip("-")[:_LONGEST]
    found = difflib.get_close_matches(begun, bare, n=1, cutoff=_ALIKE)
    if not found and len(begun) > 2:
        found = [word for word in reversed(bare) if sorted(word) == sorted(begun)]
    if not found and len(begun) > 1:
        found = sorted((word for word in bare if word.startswith(begun)), key=len)
    if not found and len(begun) > 2:
        parts = set(begun.split("-"))
        found = [word for word in reversed(bare) if parts <= set(word.split("-"))]
    return bare[found[0]] if found else None


def suggestion(typed: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest word, with a space behind it; or nothing."""
    near = nearest(typed, known)
    return "" if near is None else f"did you mean {near}? "
