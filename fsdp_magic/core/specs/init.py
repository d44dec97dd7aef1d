"""The options of ``%fsdp_init``: which engines to start; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import at_least, choice
from fsdp_magic.core.specs.model import ModelSpec
from fsdp_magic.core.specs.strategy import SYNC_BATCHNORM_ON_CPU, StrategySpec
from fsdp_magic.core.units import parse_bytes
from fsdp_magic.core.wording import quoted

Device = Literal["auto", "cuda", "cpu"]
_MOST_ENGINES = 4096
"""More is a slip of the fingers, and would take the machine down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitSpec(StrategySpec):
    """Which engines to start, and how models are spread over them unless told otherwise."""

    inherited_last: ClassVar[bool] = True

    n: int | None = option(
        "-n",
        default=None,
        takes="N",
        help="number of engines; without it one per GPU, or 2 on CPU",
        habits=("--num-processes", "--nproc-per-node"),
    )
    device: Device = option(
        "--device",
        default="auto",
        takes="DEVICE",
        choices=get_args(Device),
        help="what engines compute on; auto: GPUs where there are any",
    )
    share_gpus: bool = option(
        "--share-gpus",
        default=False,
        help="let several engines share a GPU, each capped at its share of the memory",
    )
    memory_limit: str | None = option(
        "--memory-limit",
        default=None,
        takes="SIZE",
        help="make every CPU engine a device of this size, such as 2GiB",
    )
    seed: int = option("--seed", default=0, takes="S", help="seed of every random generator")
    restart: bool = option(
        "--restart", default=False, help="replace the engines of a running session"
    )

    def __post_init__(self) -> None:
        StrategySpec.__post_init__(self)
        object.__setattr__(self, "device", str(self.device).lower())
        choice("--device", self.device, get_args(Device))
        if self.sync_batchnorm and self.device == "cpu":
            raise UsageError(SYNC_BATCHNORM_ON_CPU)
        at_least("-n", self.n, 1)
        if self.n is not None and self.n > _MOST_ENGINES:
            raise UsageError(f"-n {quoted(self.n)} cannot work; it takes up to {_MOST_ENGINES}")
        at_least("--seed", self.seed, 0)
        if self.seed >= 2**32:
            raise UsageError(
                f"--seed {quoted(self.seed)} cannot work; it takes a number below 2**32"
            )
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit, what="--memory-limit")
            if self.device == "cuda":
                raise UsageError(
                    "--memory-limit is for CPU engines; a GPU has the size it has: "
                    "leave it out, or use --device cpu"
                )

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit in bytes."""
        if self.memory_limit is None:
            return None
        return parse_bytes(self.memory_limit, what="--memory-limit")

    @property
    def defaults(self) -> ModelSpec:
        """The strategy options that models get unless told otherwise."""
        return ModelSpec(**self.strategy_options)
