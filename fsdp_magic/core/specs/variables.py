"""The options of the magics that move or show variables and models; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import names
from fsdp_magic.core.wording import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesSpec:
    """Names to push."""

    names: tuple[str, ...] = option(
        default=(),
        takes="NAME",
        many=True,
        completes="notebook",
        help="variables of the notebook",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names(self.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpec:
    """Expressions to pull."""

    names: tuple[str, ...] = option(
        default=(),
        takes="EXPRESSION",
        many=True,
        completes="engines",
        help="Python expressions without spaces",
    )
    rank: str = option(
        "--rank",
        default="0",
        takes="R",
        choices=("all",),
        completes="ranks",
        help="the rank to take the value from; all: from every rank, as a list",
    )
    yes: bool = option("--yes", default=False, help="also above 1 GiB")

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names(self.names))
        rank = str(self.rank)
        if rank.lower() == "all":
            object.__setattr__(self, "rank", "all")
        elif not rank.isdecimal() or len(rank) > 9:
            raise UsageError(
                f"--rank {quoted(self.rank)} is neither a rank nor all, as in --rank 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsSpec:
    """Which model to show."""

    names: tuple[str, ...] = option(
        default=(),
        takes="NAME",
        many=True,
        completes="engines",
        help="the model; without it the only one",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names(self.names))
        if len(self.names) > 1:
            raise UsageError(f"one model at a time; {len(self.names)} were named")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptySpec:
    """No options at all."""
