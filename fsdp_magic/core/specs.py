"""Every option of every magic, declared once as frozen dataclasses; pure.

The magics, their help and the Python API all come from these fields, and each spec checks its
values once, when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.units import parse_bytes

Strategy = Literal["full_shard", "shard_grad_op"]
Device = Literal["auto", "cuda", "cpu"]

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
        object.__setattr__(self, "strategy", _strategy(self.strategy))
        object.__setattr__(self, "names", _names(self.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class InitSpec:
    """Which engines to start."""

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
    strategy: Strategy = option(
        "--strategy",
        default="full_shard",
        takes="STRATEGY",
        choices=get_args(Strategy),
        help="the session's default; see %%fsdp_model",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", _strategy(self.strategy))
        _choice("--device", self.device, get_args(Device))
        _at_least("-n", self.n, 1)
        _at_least("--seed", self.seed, 0)
        if self.seed >= 2**32:
            raise UsageError(f"--seed {self.seed} cannot work; it takes a number below 2**32")
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
        return ModelSpec(strategy=self.strategy)


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
        _above("--timeout", self.timeout, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How a cell runs as training steps."""

    data: str | None = option(
        "--data",
        default=None,
        takes="NAME",
        help="a data set, DataLoader or iterable on the engines; binds `batch`",
        habits=("--dataset", "--train-data"),
    )
    collate: str | None = option(
        "--collate", default=None, takes="NAME", help="a function: list of samples -> batch"
    )
    no_shuffle: bool = option(
        "--no-shuffle", default=False, help="take the samples in their own order"
    )
    steps: int | None = option(
        "--steps",
        default=None,
        takes="N",
        help="optimizer steps; without it and without --epochs: one epoch of --data, or 1",
        habits=("--max-steps",),
    )
    epochs: int | None = option(
        "--epochs",
        default=None,
        takes="E",
        help="times through --data",
        habits=("--num-train-epochs",),
    )
    micro_batch_size: int | None = option(
        "--micro-batch-size",
        default=None,
        takes="B",
        help="samples per rank per forward; default 8, or a DataLoader's own",
        habits=("--per-device-train-batch-size", "--batch-size"),
    )
    accumulate: int = option(
        "--accumulate",
        default=1,
        takes="K",
        help="micro-batches per optimizer step",
        habits=("--gradient-accumulation-steps",),
    )
    max_grad_norm: float | None = option(
        "--max-grad-norm",
        default=None,
        takes="X",
        help="clip the global gradient norm to this",
        habits=("--clip",),
    )
    output: str | None = option(
        "-o", default=None, takes="NAME", help="bind the Run to this name in the notebook"
    )

    def __post_init__(self) -> None:
        for flag, value in (
            ("--steps", self.steps),
            ("--epochs", self.epochs),
            ("--micro-batch-size", self.micro_batch_size),
            ("--accumulate", self.accumulate),
        ):
            _at_least(flag, value, 1)
        _above("--max-grad-norm", self.max_grad_norm, 0)
        if self.steps is not None and self.epochs is not None:
            raise UsageError(
                f"--steps {self.steps} and --epochs {self.epochs} say two lengths; give one"
            )
        if self.data is None:
            self._need_no_data()
        if self.output is not None and not self.output.isidentifier():
            raise UsageError(f"-o {self.output!r} is not a name; give one such as -o run")

    def _need_no_data(self) -> None:
        """Refuse options that only mean something with data."""
        for flag, value in (
            ("--epochs", self.epochs),
            ("--collate", self.collate),
            ("--no-shuffle", self.no_shuffle or None),
            ("--micro-batch-size", self.micro_batch_size),
        ):
            if value is not None:
                raise UsageError(f"{flag} needs data; add --data NAME, or leave {flag} out")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesSpec:
    """Names to push."""

    names: tuple[str, ...] = option(
        default=(), takes="NAME", many=True, help="variables of the notebook"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _names(self.names))


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
        object.__setattr__(self, "names", _names(self.names))
        if self.rank != "all" and not self.rank.isdecimal():
            raise UsageError(f"--rank {self.rank!r} is neither a rank nor all, as in --rank 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsSpec:
    """Which model to show."""

    names: tuple[str, ...] = option(
        default=(), takes="NAME", many=True, help="the model; without it the only one"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _names(self.names))
        if len(self.names) > 1:
            raise UsageError(f"one model at a time; {len(self.names)} were named")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptySpec:
    """No options at all."""


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


def _strategy(value: str) -> str:
    """Return our name for a strategy typed in any case or under a habitual name."""
    lowered = str(value).lower()
    name = STRATEGY_HABITS.get(lowered, lowered)
    _choice("--strategy", name, get_args(Strategy))
    return name


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{flag} {value!r} is not known; it takes {', '.join(allowed)}")


def _at_least(flag: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{flag} {value!r} cannot work; it takes a whole number from {least}")


def _above(flag: str, value: float | None, bound: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > bound:
        raise UsageError(f"{flag} {value!r} cannot work; it takes a number above {bound}")
