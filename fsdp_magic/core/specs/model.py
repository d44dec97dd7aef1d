"""The options of ``%%fsdp_model``: what is spread over the ranks, and how; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from keyword import iskeyword

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.options import option
from fsdp_magic.core.specs.checks import names
from fsdp_magic.core.specs.strategy import StrategySpec
from fsdp_magic.core.wording import quoted


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
        for name in self.names:
            first = re.match(r"\w*", name)[0]  # type: ignore[index]
            if not first.isidentifier() or iskeyword(first):
                raise UsageError(
                    f"{quoted(name)} is no name of a model; names of what the cell binds stand "
                    "here, such as model or nets.generator"
                )
