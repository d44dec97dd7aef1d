"""ENGINE: ``hybrid_shard``: shards within groups of ranks, replicas of them between the groups.

It is ``full_shard`` on a mesh of two axes: FSDP2 gathers and reduces within a group of
``--shard-size`` neighbouring ranks, and adds gradients up between the groups. Ranks of a host are
neighbours, so that what is sent often stays on it.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.world import World


def mesh_of(spec: ModelSpec, world: World) -> DeviceMesh:
    """Return the mesh that a model is spread over: one axis, or two under ``hybrid_shard``.

    Collective: every rank must call this, the first time for a shard size.

    Raises:
        FsdpError: if the shard size is missing or does not divide the world size.
    """
    if spec.strategy != "hybrid_shard":
        return world.mesh
    return world.hybrid_mesh(_shard_size(spec.shard_size, world))


def _shard_size(asked: int | None, world: World) -> int:
    """Return how many ranks share a copy of the model: as asked, else those of a host."""
    ranks, on_host = world.world_size, world.request.local_world_size
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    if asked is None and on_host < ranks and ranks % on_host == 0:
        return on_host
    if asked is None:
        why = "all ranks are on one host" if on_host == ranks else "hosts have unlike numbers"
        raise FsdpError(
            f"hybrid_shard shares a copy of the model within a host, and {why}; say how many ranks "
            f"share one: --shard-size N, one of {divisors}"
        )
    if ranks % asked:
        raise FsdpError(f"--shard-size {asked} does not divide {ranks} ranks; it takes {divisors}")
    return asked
