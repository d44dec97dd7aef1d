"""The options of ``%%fsdp``: where and how long a plain cell runs; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import above


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How a plain cell runs."""

    ranks: str | None = option(
        "--ranks",
        default=None,
        takes="RANKS",
        help="run on these ranks only, such as 0,2-3",
    )
    timeout: float | None = option(
        "--timeout",
        default=None,
        takes="SECONDS",
        help="stop the cell after this time and raise an error",
    )

    def __post_init__(self) -> None:
        above("--timeout", self.timeout, 0)


def parse_ranks(text: str, *, world_size: int) -> tuple[int, ...]:
    """Return the ranks that ``0,2-3`` names, sorted.

    Raises:
        UsageError: if it names none, or one outside the world.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--ranks {text!r} is not a list of ranks; one is --ranks 0,2-3")
        ranks.update(range(int(first), int(last or first) + 1))
    outside = [rank for rank in sorted(ranks) if rank >= world_size]
    if outside or not ranks:
        raise UsageError(
            f"--ranks {text!r} names rank {outside[0] if outside else 'none'}; "
            f"this world has ranks 0 to {world_size - 1}"
        )
    return tuple(sorted(ranks))
