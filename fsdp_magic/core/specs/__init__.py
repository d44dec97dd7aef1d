"""Every option of every magic, declared once as frozen dataclasses, a file a magic; pure.

The magics, their help and the Python API all come from these fields, and each spec checks its
values once, when it is made.
"""

from fsdp_magic.core.specs.evaluate import EvalSpec
from fsdp_magic.core.specs.init import Device, InitSpec
from fsdp_magic.core.specs.model import STRATEGY_HABITS, ModelSpec, Strategy
from fsdp_magic.core.specs.run import RunSpec, parse_ranks
from fsdp_magic.core.specs.train import TrainSpec
from fsdp_magic.core.specs.variables import EmptySpec, NamesSpec, PullSpec, ShardsSpec

__all__ = [
    "STRATEGY_HABITS",
    "Device",
    "EmptySpec",
    "EvalSpec",
    "InitSpec",
    "ModelSpec",
    "NamesSpec",
    "PullSpec",
    "RunSpec",
    "ShardsSpec",
    "Strategy",
    "TrainSpec",
    "parse_ranks",
]
