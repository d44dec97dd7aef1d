"""The options of ``%fsdp_init`` and ``%%fsdp_model`` that say how models are spread; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import at_least, choice
from fsdp_magic.core.specs.wrap import checked_wrap

Strategy = Literal["full_shard", "shard_grad_op", "zero1", "ddp", "hybrid_shard"]
Precision = Literal["fp32", "bf16", "fp16"]
ActivationCheckpointing = Literal["blocks", "selective"]
AccumulateSync = Literal["every", "last"]

STRATEGY_HABITS: Mapping[str, Strategy] = {
    "fsdp": "full_shard",
    "zero3": "full_shard",
    "zero2": "shard_grad_op",
    "no_shard": "ddp",
}
"""Names of strategies that people bring from other tools, and ours."""
PRECISION_HABITS: Mapping[str, Precision] = {
    "no": "fp32",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
"""Names of precisions that people bring from other tools, and ours."""
OFFLOADED = ("full_shard", "shard_grad_op", "hybrid_shard")
"""The strategies that keep parameters in shards, which can be offloaded."""
SYNC_BATCHNORM_ON_CPU = (
    "--sync-batchnorm needs GPUs: torch's SyncBatchNorm refuses CPU tensors; without it BatchNorm "
    "normalises over a rank's micro-batch, and running statistics are averaged over the ranks at "
    "evaluation"
)


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
        habits=("--fsdp-transformer-layer-cls-to-wrap",),
        shorthands=(("--fsdp-min-num-params", "size:{}"),),
        help="what is gathered at once, a unit: blocks: each repeated block; size:NUM_PARAMS: "
        "modules from that many parameters on; CLASS[,CLASS]: modules of these classes; none: the "
        "whole model",
    )
    precision: Precision = option(
        "--precision",
        default="fp32",
        takes="PRECISION",
        choices=get_args(Precision),
        habits=("--mixed-precision",),
        shorthands=(("--bf16", "bf16"), ("--fp16", "fp16")),
        help="what forward and backward compute in; weights stay as made, gradients are reduced "
        "in fp32",
    )
    cpu_offload: bool = option(
        "--cpu-offload",
        default=False,
        shorthands=(("--no-cpu-offload", None),),
        help="keep shards in host memory between uses; on CPU engines they are there anyway",
    )
    activation_checkpointing: ActivationCheckpointing | Literal[False] = option(
        "--activation-checkpointing",
        default=False,
        takes="WHAT",
        choices=get_args(ActivationCheckpointing),
        alone="blocks",
        habits=("--gradient-checkpointing",),
        shorthands=(
            ("--no-activation-checkpointing", None),
            ("--no-gradient-checkpointing", None),
        ),
        help="compute activations again in backward instead of keeping them: of each block, or "
        "only what is cheap to compute",
    )
    compile: bool = option(
        "--compile",
        default=False,
        shorthands=(("--no-compile", None),),
        help="compile each unit with torch.compile",
    )
    sync_batchnorm: bool = option(
        "--sync-batchnorm",
        default=False,
        shorthands=(("--no-sync-batchnorm", None),),
        help="let BatchNorm normalise over the micro-batches of all ranks; needs GPUs",
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
        self._set("strategy", known_strategy(self.strategy))
        at_least("--shard-size", self.shard_size, 1)
        self._set("wrap", checked_wrap(self.wrap))
        self._set("precision", _word("--precision", self.precision, Precision, PRECISION_HABITS))
        self._set("activation_checkpointing", _checkpointed(self.activation_checkpointing))
        if self.accumulate_sync is not None:
            sync = _word("--accumulate-sync", self.accumulate_sync, AccumulateSync)
            self._set("accumulate_sync", sync)
        self._refuse_contradictions()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refuse_contradictions(self) -> None:
        if self.shard_size is not None and self.strategy != "hybrid_shard":
            raise UsageError(
                f"--shard-size is for --strategy hybrid_shard, and this is {self.strategy}; leave "
                "one of them out"
            )
        if self.cpu_offload and self.strategy not in OFFLOADED:
            raise UsageError(
                f"--cpu-offload keeps shards of parameters in host memory, and {self.strategy} "
                f"makes none; use it with --strategy {', '.join(OFFLOADED[:-1])} or "
                f"{OFFLOADED[-1]}"
            )

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Return the options that models get as the session's defaults."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(StrategySpec)}

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was given for one model, and the session's options for the rest.

        A model of another strategy does not take what is only for the session's.
        """
        rest = self.strategy_options
        if "strategy" in given and known_strategy(given["strategy"]) != self.strategy:
            rest["shard_size"] = None
            rest["cpu_offload"] &= known_strategy(given["strategy"]) in OFFLOADED
        return {**rest, **given}


def known_strategy(value: object, flag: str = "--strategy") -> str:
    """Return our name for a strategy typed in any case or under a habitual name."""
    return _word(flag, value, Strategy, STRATEGY_HABITS)


def _checkpointed(value: object) -> str | bool:
    """Return what is computed again in backward; False: nothing."""
    if value is None or value is False:
        return False
    flag = "--activation-checkpointing"
    return "blocks" if value is True else _word(flag, value, ActivationCheckpointing)


def _word(flag: str, value: object, allowed: Any, habits: Mapping[str, str] | None = None) -> str:
    """Return one of the words that an option takes, typed in any case or as a habit is.

    Raises:
        UsageError: if it is none of them.
    """
    lowered = str(value).lower()
    name = (habits or {}).get(lowered, lowered)
    choice(flag, name, get_args(allowed))
    return name
