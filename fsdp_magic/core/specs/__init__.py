"""Every option of every magic, declared once as frozen dataclasses, a file a magic; pure.

The magics, their help and the Python API all come from these fields, and each spec checks its
values once, when it is made.
"""

from collections.abc import Mapping
from typing import Any

from fsdp_magic.core.specs.compare import CompareSpec
from fsdp_magic.core.specs.console import ConsoleSpec
from fsdp_magic.core.specs.evaluate import EvalSpec
from fsdp_magic.core.specs.init import Device, InitSpec
from fsdp_magic.core.specs.model import ModelSpec
from fsdp_magic.core.specs.plan import PlanSpec
from fsdp_magic.core.specs.run import RunSpec, parse_ranks
from fsdp_magic.core.specs.strategy import STRATEGY_HABITS, Strategy, StrategySpec
from fsdp_magic.core.specs.train import TrainSpec
from fsdp_magic.core.specs.tune import TuneSpec
from fsdp_magic.core.specs.variables import EmptySpec, NamesSpec, PullSpec, ShardsSpec

__all__ = [
    "MAGICS",
    "STRATEGY_HABITS",
    "CompareSpec",
    "ConsoleSpec",
    "Device",
    "EmptySpec",
    "EvalSpec",
    "InitSpec",
    "ModelSpec",
    "NamesSpec",
    "PlanSpec",
    "PullSpec",
    "RunSpec",
    "ShardsSpec",
    "Strategy",
    "StrategySpec",
    "TrainSpec",
    "TuneSpec",
    "parse_ranks",
]

MAGICS: Mapping[str, type[Any]] = {
    "%fsdp_init": InitSpec,
    "%%fsdp": RunSpec,
    "%%fsdp_model": ModelSpec,
    "%%fsdp_train": TrainSpec,
    "%%fsdp_eval": EvalSpec,
    "%fsdp_compare": CompareSpec,
    "%%fsdp_tune": TuneSpec,
    "%%fsdp_plan": PlanSpec,
    "%fsdp_shards": ShardsSpec,
    "%fsdp_status": EmptySpec,
    "%fsdp_console": ConsoleSpec,
    "%fsdp_push": NamesSpec,
    "%fsdp_pull": PullSpec,
    "%fsdp_restart": EmptySpec,
    "%fsdp_shutdown": EmptySpec,
}
"""Every magic as it is typed, and the spec that its line becomes."""
