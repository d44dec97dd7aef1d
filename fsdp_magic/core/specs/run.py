"""The options of ``%%fsdp``: where and how long a plain cell runs; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import above, text
from fsdp_magic.core.wording import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How a plain cell runs."""

    ranks: str | None = option(
        "--ranks",
        default=None,
        takes="RANKS",
        completes="ranks",
        help="run on these ranks only, such as 0,2-3",
    )
    timeout: float | None = option(
        "--timeout",
        default=None,
        takes="SECONDS",
        help="stop the cell after this time and raise an error",
    )

    def __post_init__(self) -> None:
        text("--ranks", self.ranks)
        above("--timeout", self.timeout, 0)


def parse_ranks(text: str, *, world_size: int) -> tuple[int, ...]:
    """Return the ranks that ``0,2-3`` names, sorted.

    Raises:
        UsageError: if it names none, or one outside the world.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_rank(first) or (dash and not _is_rank(last)):
            raise UsageError(f"--ranks {quoted(text)} is not a list of ranks; one is --ranks 0,2-3")
        start, end = int(first), int(last or first)
        ranks.update(range(start, min(end, world_size) + 1))  # one too many is enough to refuse
        if start > world_size:
            ranks.add(start)
    outside = [rank for rank in sorted(ranks) if rank >= world_size]
    if outside or not ranks:
        raise UsageError(
            f"--ranks {quoted(text)} names rank {outside[0] if outside else 'none'}; "
            f"this world has ranks 0 to {world_size - 1}"
        )
    return tuple(sorted(ranks))


def _is_rank(text: str) -> bool:
    return text.isdecimal() and len(text) < 10
