"""Checks of option values that specs share; pure."""

from __future__ import annotations

from typing import Any

from fsdp_magic.core.errors import UsageError


def names(value: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise if a value is not one of those allowed."""
    if value not in allowed:
        raise UsageError(f"{flag} {value!r} is not known; it takes {', '.join(allowed)}")


def at_least(flag: str, value: int | None, least: int) -> None:
    """Raise if a value is given and is not a whole number from ``least``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{flag} {value!r} cannot work; it takes a whole number from {least}")


def above(flag: str, value: float | None, bound: float) -> None:
    """Raise if a value is given and is not a number above ``bound``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > bound:
        raise UsageError(f"{flag} {value!r} cannot work; it takes a number above {bound}")
