"""The options of ``%%fsdp_model``: what is spread over the ranks, and how; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import names
from fsdp_magic.core.specs.strategy import StrategySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(StrategySpec):
    """What is spread over the ranks, and how."""

    names: tuple[str, ...] = option(
        default=(),
        takes="NAME",
        many=True,
        completes="engines",
        help="what to shard, as dotted names; without any: every module that the cell bound",
    )
    meta: bool = option(
        "--meta",
        default=False,
        help="build the model without memory, and initialise its shards by its own rules",
    )

    def __post_init__(self) -> None:
        StrategySpec.__post_init__(self)
        object.__setattr__(self, "names", names(self.names))
