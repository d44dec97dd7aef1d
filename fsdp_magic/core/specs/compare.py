"""The options of ``%fsdp_compare``: which strategies, and how many steps of each; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option, options_of
from fsdp_magic.core.specs.checks import at_least, names
from fsdp_magic.core.specs.model import ModelSpec
from fsdp_magic.core.specs.strategy import (
    OFFLOADED,
    PRECISION_HABITS,
    Precision,
    Strategy,
    StrategySpec,
    known_strategy,
)
from fsdp_magic.core.wording import quoted, suggestion

EVERY: tuple[Strategy, ...] = ("ddp", "zero1", "hybrid_shard", "shard_grad_op", "full_shard")
"""From the one that holds most on every rank to the one that holds least."""
ADDED = (*get_args(Precision), "cpu_offload", "activation_checkpointing")
"""What may stand behind a plus sign."""
_ADDED_HABITS = {**PRECISION_HABITS, "gradient_checkpointing": "activation_checkpointing"}
_HYBRID = "hybrid_shard"


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
        word, colon, number = first.partition(":")
        strategy = known_strategy(_habit(word), "--strategies")
        sizes = (("shard_size", _shard_size(text, strategy, number)),) if colon else ()
        added = [_ADDED_HABITS.get(part, part) for part in rest]
        changes = (*sizes, *(_change(text, part) for part in added))
        if len({field for field, _ in changes}) < len(changes):
            raise UsageError(f"{quoted(text)} says the same twice; say it once")
        name = "+".join((f"{strategy}:{sizes[0][1]}" if sizes else strategy, *added))
        return cls(name=name, strategy=strategy, changes=changes)

    def sized(self, shard_size: int) -> Variant:
        """Return it with a shard size, where it is of the strategy that has one and names none."""
        if self.strategy != _HYBRID or "shard_size" in dict(self.changes):
            return self
        name = self.name.replace(_HYBRID, f"{_HYBRID}:{shard_size}", 1)
        changes = (("shard_size", shard_size), *self.changes)
        return dataclasses.replace(self, name=name, changes=changes)

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """Return how a model is spread by it; what it does not name is as the model was built."""
        changes: dict[str, Any] = {"strategy": self.strategy, "shard_size": None}
        if self.strategy not in OFFLOADED:
            changes["cpu_offload"] = False
        return dataclasses.replace(spec, **{**changes, **dict(self.changes)})


def listed_strategies(given: Any) -> tuple[str, ...]:
    """Return the names of strategies as they are shown.

    Args:
        given: what ``--strategies`` takes, or a list of names.

    Raises:
        UsageError: if one is not known, or is there twice.
    """
    listed = given.split(",") if isinstance(given, str) else names(given)
    strategies = tuple(Variant.parsed(text).name for text in listed)
    double = next((name for name in strategies if strategies.count(name) > 1), None)
    if double is not None:
        raise UsageError(f"--strategies names {double} twice; name it once")
    return strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSpec:
    """Which strategies the last training cell runs under, and for how long."""

    strategies: tuple[str, ...] = option(
        "--strategies",
        default=(),
        takes="A,B,C",
        listed=EVERY,
        added=ADDED,
        help="strategies to compare, each with what differs from the model as it was built: "
        "STRATEGY[+PRECISION][+cpu_offload][+activation_checkpointing], such as "
        "full_shard,ddp+bf16; hybrid_shard:N has copies of N ranks; without it every strategy, "
        "hybrid_shard where ranks make groups: from 4 on, or on several hosts",
    )
    steps: int = option(
        "--steps",
        default=8,
        takes="N",
        completes="engines",
        help="optimizer steps of each that are measured, after 2 that warm up",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategies", listed_strategies(self.strategies))
        at_least("--steps", self.steps, 1)

    def variants(
        self, built: Sequence[ModelSpec], *, world_size: int, ranks_on_host: int
    ) -> tuple[Variant, ...]:
        """Return what is compared.

        Args:
            built: how the models are spread now.
            world_size: ranks there are.
            ranks_on_host: ranks of each host.

        Raises:
            UsageError: if two of them are one for these models.
        """
        size = next((spec.shard_size for spec in built if spec.shard_size), None)
        size = size or ranks_of_a_copy(world_size, ranks_on_host)
        asked = self.strategies or tuple(name for name in EVERY if name != _HYBRID or size > 1)
        variants = tuple(Variant.parsed(text).sized(size) for text in asked)
        first: dict[Any, int] = {}
        built_with = as_built(built) or "no other options"
        for number, variant in enumerate(variants):
            known = first.setdefault(tuple(map(variant.applied, built)), number)
            if known != number:
                raise UsageError(
                    f"--strategies: {asked[known]} and {asked[number]} are the same for a model "
                    f"built with {built_with}; leave one out, or say what differs"
                )
        return variants


def as_built(built: Sequence[ModelSpec]) -> str:
    """Return what models were built with beside the strategy, as it is typed; empty: nothing."""
    shown: list[str] = []
    options = options_of(StrategySpec)
    defaults = StrategySpec()
    for name, declared in options.items():
        if name in ("strategy", "shard_size"):
            continue
        for value in dict.fromkeys(getattr(spec, name) for spec in built):
            if value != getattr(defaults, name):
                shown.append(f"{declared.flags[0]}{'' if value is True else f' {value}'}")
    return " ".join(shown)


def _habit(word: str) -> str:
    """Return a strategy's name; parts that people join by a dash came as if by an underscore."""
    return word.replace("zero_", "zero")


def ranks_of_a_copy(world_size: int, ranks_on_host: int) -> int:
    """Return how many ranks share a copy where nobody says it: a host's, or half of one host's."""
    if ranks_on_host < world_size and world_size % ranks_on_host == 0:
        return ranks_on_host
    return max((n for n in range(1, world_size // 2 + 1) if world_size % n == 0), default=1)


def _shard_size(text: str, strategy: str, number: str) -> int:
    """Return the ranks of a copy that stand behind a colon."""
    if strategy != _HYBRID:
        raise UsageError(
            f"{quoted(text)} cannot work; only hybrid_shard has a size: hybrid_shard:2"
        )
    if not (number.isascii() and number.isdigit() and 0 < len(number) < 10 and int(number)):
        raise UsageError(
            f"{quoted(text)} cannot work; behind hybrid_shard stands a number of ranks: "
            "hybrid_shard:2"
        )
    return int(number)


def _change(text: str, part: str) -> tuple[str, Any]:
    """Return the field that a part behind a plus sign changes, and its value."""
    if part in get_args(Precision):
        return "precision", part
    if part in ADDED:
        return part, True
    raise UsageError(
        f"{quoted(part)} in {quoted(text)} is not known; {suggestion(part, ADDED)}behind a "
        f"strategy stand {', '.join(ADDED)}, as in ddp+bf16"
    )
