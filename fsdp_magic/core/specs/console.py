"""The options of ``%fsdp_console``; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSpec:
    """Which rank a console is opened on."""

    rank: int = option(
        "--rank", default=0, takes="R", completes="ranks", help="the rank to look into"
    )

    def __post_init__(self) -> None:
        at_least("--rank", self.rank, 0)
