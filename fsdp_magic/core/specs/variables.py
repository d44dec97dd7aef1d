"""The options of the magics that move or show variables and models; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import names


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesSpec:
    """Names to push."""

    names: tuple[str, ...] = option(
        default=(), takes="NAME", many=True, help="variables of the notebook"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names(self.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpec:
    """Expressions to pull."""

    names: tuple[str, ...] = option(
        default=(), takes="EXPRESSION", many=True, help="Python expressions without spaces"
    )
    rank: str = option(
        "--rank", default="0", takes="R", help="the rank to take the value from, or all"
    )
    yes: bool = option("--yes", default=False, help="also above 1 GiB")

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names(self.names))
        if self.rank != "all" and not self.rank.isdecimal():
            raise UsageError(f"--rank {self.rank!r} is neither a rank nor all, as in --rank 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsSpec:
    """Which model to show."""

    names: tuple[str, ...] = option(
        default=(), takes="NAME", many=True, help="the model; without it the only one"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names(self.names))
        if len(self.names) > 1:
            raise UsageError(f"one model at a time; {len(self.names)} were named")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptySpec:
    """No options at all."""
