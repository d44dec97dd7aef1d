"""The options of ``%fsdp_init`` and ``%%fsdp_model`` that say how models are spread; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import at_least, choice, text

Strategy = Literal["full_shard", "shard_grad_op", "zero1", "ddp", "hybrid_shard"]
Precision = Literal["fp32", "bf16", "fp16"]
AccumulateSync = Literal["every", "last"]

STRATEGY_HABITS: Mapping[str, Strategy] = {
    "fsdp": "full_shard",
    "zero3": "full_shard",
    "zero2": "shard_grad_op",
    "no_shard": "ddp",
}
"""Names of strategies that people bring from other tools, and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """How a model is spread over the ranks, and how it computes there."""

    strategy: Strategy = option(
        "--strategy",
        default="full_shard",
        takes="STRATEGY",
        choices=get_args(Strategy),
        help="full_shard: parameters, gradients and optimizer state in shards (ZeRO-3); "
        "shard_grad_op: parameters stay whole between forward and backward (ZeRO-2); "
        "zero1: only the optimizer's state is in shards; ddp: every rank holds all; "
        "hybrid_shard: full_shard within groups of --shard-size ranks, replicas between them",
    )
    shard_size: int | None = option(
        "--shard-size",
        default=None,
        takes="N",
        help="ranks that share one copy of the model under hybrid_shard; by default those of a "
        "host",
    )
    wrap: str = option(
        "--wrap",
        default="blocks",
        takes="RULE",
        help="what is gathered at once: blocks: each repeated block; size:NUM_PARAMS: modules "
        "from that many parameters on; CLASS[,CLASS]: modules of these classes; none: the whole "
        "model",
    )
    precision: Precision = option(
        "--precision",
        default="fp32",
        takes="PRECISION",
        choices=get_args(Precision),
        help="what forward and backward compute in; weights stay as made, gradients are reduced "
        "in fp32",
    )
    cpu_offload: bool = option(
        "--cpu-offload",
        default=False,
        help="keep shards in host memory between uses; on CPU engines they are there anyway",
    )
    activation_checkpointing: bool = option(
        "--activation-checkpointing",
        default=False,
        help="compute the activations of each block again in backward instead of keeping them",
    )
    compile: bool = option("--compile", default=False, help="compile each unit with torch.compile")
    sync_batchnorm: bool = option(
        "--sync-batchnorm",
        default=False,
        help="normalise over the micro-batches of all ranks; needs GPUs",
    )
    accumulate_sync: AccumulateSync | None = option(
        "--accumulate-sync",
        default=None,
        takes="WHEN",
        choices=get_args(AccumulateSync),
        help="when gradients are reduced over the ranks with --accumulate: at every micro-step, "
        "or at the last, which keeps them whole until then",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", known_strategy(self.strategy))
        at_least("--shard-size", self.shard_size, 1)
        text("--wrap", self.wrap)
        object.__setattr__(self, "precision", str(self.precision).lower())
        choice("--precision", self.precision, get_args(Precision))
        if self.accumulate_sync is not None:
            object.__setattr__(self, "accumulate_sync", str(self.accumulate_sync).lower())
            choice("--accumulate-sync", str(self.accumulate_sync), get_args(AccumulateSync))

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Return the options that models get as the session's defaults."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(StrategySpec)}


def known_strategy(value: str) -> str:
    """Return our name for a strategy typed in any case or under a habitual name."""
    lowered = str(value).lower()
    name = STRATEGY_HABITS.get(lowered, lowered)
    choice("--strategy", name, get_args(Strategy))
    return name
