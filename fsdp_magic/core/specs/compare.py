"""The options of ``%fsdp_compare``: which strategies, and how many steps of each; pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import at_least, names
from fsdp_magic.core.specs.model import ModelSpec
from fsdp_magic.core.specs.strategy import Precision, known_strategy
from fsdp_magic.core.wording import quoted

_WHOLE = ("zero1", "ddp")
"""Strategies that keep whole parameters on the device, which offload takes away from it."""
_SMALLEST_HYBRID = 4
"""Ranks that two groups of two need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to spread the models that are there: ``ddp``, ``full_shard+bf16+cpu_offload``.

    Attributes:
        name: as it is shown.
        strategy: the strategy.
        changes: fields of the models' ``ModelSpec`` that it names beside it.
    """

    name: str
    strategy: str
    changes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parsed(cls, text: str) -> Variant:
        """Return what a text means.

        Raises:
            UsageError: if a part of it is not known.
        """
        first, *rest = (part.strip().lower().replace("-", "_") for part in text.split("+"))
        strategy = known_strategy(first)
        changes = tuple(_change(text, part) for part in rest)
        if len({field for field, _ in changes}) < len(changes):
            raise UsageError(f"{quoted(text)} says the same twice; say it once")
        return cls(name="+".join((strategy, *rest)), strategy=strategy, changes=changes)

    def applied(self, spec: ModelSpec, *, world_size: int) -> ModelSpec:
        """Return how a model is spread by it; what it does not name is as the model was built."""
        changes: dict[str, Any] = {"strategy": self.strategy, "shard_size": None}
        if self.strategy == "hybrid_shard":
            is_now = spec.strategy == self.strategy
            changes["shard_size"] = spec.shard_size if is_now else world_size // 2
        if self.strategy in _WHOLE:
            changes["cpu_offload"] = False
        return dataclasses.replace(spec, **{**changes, **dict(self.changes)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSpec:
    """Which strategies the last training cell runs under, and for how long."""

    strategies: tuple[str, ...] = option(
        "--strategies",
        default=(),
        takes="A,B,C",
        help="strategies to compare, each with what differs from the model as it was built: "
        "STRATEGY[+PRECISION][+cpu_offload][+activation_checkpointing], such as "
        "full_shard,ddp+bf16; without it every strategy",
    )
    steps: int = option(
        "--steps",
        default=8,
        takes="N",
        completes="engines",
        help="optimizer steps of each that are measured, after 2 that warm up",
    )

    def __post_init__(self) -> None:
        given = self.strategies
        listed = given.split(",") if isinstance(given, str) else names(given)
        strategies = tuple(Variant.parsed(text).name for text in listed)
        double = next((name for name in strategies if strategies.count(name) > 1), None)
        if double is not None:
            raise UsageError(f"--strategies names {double} twice; name it once")
        object.__setattr__(self, "strategies", strategies)
        at_least("--steps", self.steps, 1)

    def variants(self, *, world_size: int) -> tuple[Variant, ...]:
        """Return what is compared on so many ranks."""
        strategies = self.strategies or ("full_shard", "shard_grad_op", "zero1", "ddp")
        hybrid = world_size >= _SMALLEST_HYBRID and world_size % 2 == 0
        if not self.strategies and hybrid:
            strategies = (*strategies, "hybrid_shard")
        return tuple(map(Variant.parsed, strategies))


def _change(text: str, part: str) -> tuple[str, Any]:
    """Return the field that a part behind a plus sign changes, and its value."""
    if part in get_args(Precision):
        return "precision", part
    if part in ("cpu_offload", "activation_checkpointing"):
        return part, True
    raise UsageError(
        f"{quoted(part)} in {quoted(text)} is not known; behind a strategy stand "
        f"{', '.join(get_args(Precision))}, cpu_offload, activation_checkpointing, as in ddp+bf16"
    )
