"""Checks of option values that specs share; pure."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from typing import Any

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.wording import quoted, suggestion


def names(value: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Iterable) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{quoted(value)} is no name; give one, or a list of them, as text")
    return tuple(found)


def choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise if a value is not one of those allowed."""
    if value not in allowed:
        hint = suggestion(str(value).lower(), allowed)
        takes = f"{'It' if hint else 'it'} takes {', '.join(allowed)}"
        raise UsageError(f"{flag} {quoted(value)} is not known; {hint}{takes}")


def at_least(flag: str, value: int | None, least: int) -> None:
    """Raise if a value is given and is not a whole number from ``least``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{flag} {quoted(value)} cannot work; it takes a whole number from {least}"
        )


def above(flag: str, value: float | None, bound: float) -> None:
    """Raise if a value is given and is not a number above ``bound``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > bound:
        raise UsageError(f"{flag} {quoted(value)} cannot work; it takes a number above {bound}")


def text(flag: str, value: object) -> None:
    """Raise if a value is given and is no text, or an empty one."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise UsageError(f"{flag} {quoted(value)} cannot work; it takes a name, as text")


def bound_name(flag: str, value: object, *, such_as: str) -> None:
    """Raise if a value is given and is no name that something can be bound to."""
    if value is None:
        return
    if not isinstance(value, str) or not value.isidentifier() or keyword.iskeyword(value):
        raise UsageError(f"{flag} {quoted(value)} is not a name; give one such as {flag} {such_as}")
