"""The options of ``%%fsdp_model``, which ``%fsdp_init`` takes as the session's defaults; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import choice, names

Strategy = Literal["full_shard", "shard_grad_op"]

STRATEGY_HABITS: Mapping[str, Strategy] = {
    "fsdp": "full_shard",
    "zero3": "full_shard",
    "zero2": "shard_grad_op",
}
"""Names of strategies that people bring from other tools, and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """How a model is spread over the ranks."""

    names: tuple[str, ...] = option(
        default=(),
        takes="NAME",
        many=True,
        completes="engines",
        help="what to shard, as dotted names; without any: every module that the cell bound",
    )
    strategy: Strategy = option(
        "--strategy",
        default="full_shard",
        takes="STRATEGY",
        choices=get_args(Strategy),
        help="full_shard: parameters, gradients and optimizer state in shards (ZeRO-3); "
        "shard_grad_op: parameters stay whole between forward and backward (ZeRO-2)",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", known_strategy(self.strategy))
        object.__setattr__(self, "names", names(self.names))


def known_strategy(value: str) -> str:
    """Return our name for a strategy typed in any case or under a habitual name."""
    lowered = str(value).lower()
    name = STRATEGY_HABITS.get(lowered, lowered)
    choice("--strategy", name, get_args(Strategy))
    return name
