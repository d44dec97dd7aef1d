"""ENGINE: ``--cpu-offload``: shards, their gradients and optimizer state in host memory.

A unit's shards go to the device when it is gathered; its gradients come back reduced, and the
optimizer steps on the host. Pinned memory lets the copies run beside the computation.
"""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.world import World


def policy(spec: ModelSpec, world: World) -> tuple[OffloadPolicy, list[str]]:
    """Return what FSDP2 takes, and a sentence where the option has no effect."""
    if not spec.cpu_offload:
        return OffloadPolicy(), []
    if world.device.type == "cpu":
        note = "--cpu-offload has no effect on CPU engines: shards are in host memory already"
        return OffloadPolicy(), [note]
    return CPUOffloadPolicy(pin_memory=True), []
