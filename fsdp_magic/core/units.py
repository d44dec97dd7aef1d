"""Bytes, seconds and counts, to and from text; pure. An unknown number is None and reads n/a."""

from __future__ import annotations

import re

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.wording import quoted

UNKNOWN = "n/a"
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", re.IGNORECASE)


def parse_bytes(text: str, *, what: str) -> int:
    """Return the number of bytes that a size such as ``2GiB`` or ``512 MB`` names.

    K, M, G and T always count in powers of 1,024, as memory does.

    Args:
        text: what was typed.
        what: the option it was typed for, named in the error.

    Raises:
        UsageError: if it is not a positive size with a unit.
    """
    match = _SIZE.fullmatch(str(text).strip())
    size = float(match[1]) * _UNITS[f"{match[2].upper()}iB"] if match else 0.0
    if not 1 <= size < 2**63:
        raise UsageError(
            f"{what} {quoted(text)} is not a size; a number with a unit is, such as {what} 2GiB"
        )
    return int(size)


def bytes_text(count: float | None) -> str:
    """Return a size as a person reads it: ``1.5 GiB``, ``371 MiB``, ``12 B``, ``n/a``."""
    if count is None:
        return UNKNOWN
    for name, size in _UNITS.items():
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {name}" if abs(value) >= 100 else f"{value:.1f} {name}"
    return f"{count:.0f} B"


def gib_text(count: float | None) -> str:
    """Return a number of GiB without its unit, for columns whose heading names it."""
    if count is None:
        return UNKNOWN
    value = count / GIB
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def seconds_text(seconds: float | None) -> str:
    """Return a duration as ``MM:SS`` or ``H:MM:SS``."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"


def count_text(count: float | None) -> str:
    """Return a rate or a count in three figures: ``298.9k``, ``1.2M``, ``42``."""
    if count is None:
        return UNKNOWN
    for name, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f}{name}"
    return f"{count:.1f}" if abs(count) < 10 and isinstance(count, float) else f"{count:.0f}"


def ranks_named(ranks: tuple[int, ...]) -> str:
    """Return sorted ranks with their noun: ``rank 3``, ``ranks 0-3,6``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return sorted ranks as a person writes them: ``0-3,6``."""
    parts: list[str] = []
    start = previous = None
    for rank in (*sorted(ranks), None):
        if previous is not None and rank == previous + 1:
            previous = rank
            continue
        if start is not None:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ",".join(parts)
