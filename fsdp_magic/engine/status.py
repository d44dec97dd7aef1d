"""ENGINE: what ``%fsdp_status`` tells of a rank."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from fsdp_magic.core.telemetry import RankStatus
from fsdp_magic.engine import telemetry
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.world import World


def rank_status(
    world: World,
    *,
    parameters: list[torch.nn.Parameter],
    optimizers: list[Any],
    models: tuple[str, ...],
    steps: int,
) -> RankStatus:
    """Return what a rank is and how its memory stands.

    Args:
        world: the world, which knows the rank.
        parameters: of the sharded models.
        optimizers: whose state is memory, too.
        models: the names that are bound to sharded models.
        steps: finished by them.
    """
    return RankStatus(
        rank=world.rank,
        local_rank=world.request.local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(world.device),
        device_name=telemetry.device_name(world.device),
        memory=MemoryWatch(parameters, optimizers).now(),
        activity=telemetry.activity(world.device),
        models=models,
        steps=steps,
        torch_version=str(torch.__version__),
    )
