"""ENGINE: ``--sync-batchnorm``: BatchNorm normalises over the micro-batches of all ranks.

The layers become torch's ``SyncBatchNorm`` by their class, in place: the objects, their hooks and
whatever else holds them stay. ``convert_sync_batchnorm`` would put new modules in their place.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.core.specs.strategy import SYNC_BATCHNORM_ON_CPU
from fsdp_magic.engine.world import World


def apply(module: nn.Module, spec: ModelSpec, world: World) -> list[str]:
    """Let every BatchNorm of a model normalise over all ranks, if asked to.

    Returns:
        A sentence on those that cannot.

    Raises:
        FsdpError: on CPU engines, where torch has no such thing.
    """
    if not spec.sync_batchnorm:
        return []
    if world.device.type == "cpu":
        raise FsdpError(SYNC_BATCHNORM_ON_CPU)
    left = convert(module)
    if not left:
        return []
    return [f"--sync-batchnorm leaves {', '.join(left)} alone: of a class with its own forward"]


def convert(module: nn.Module) -> list[str]:
    """Make every BatchNorm of a model a SyncBatchNorm; return the names of those that stay."""
    left = []
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm) or isinstance(part, nn.SyncBatchNorm):
            continue
        if type(part).forward is not _BatchNorm.forward:
            left.append(name or type(part).__name__)
            continue
        layer: Any = part
        layer.__class__ = nn.SyncBatchNorm
        layer.process_group = None  # of all ranks
    return left
