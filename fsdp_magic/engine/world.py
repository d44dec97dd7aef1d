"""ENGINE: a rank's place in the world: its device, its groups, the page and the vote."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_magic.core.page import Page, page_bytes
from fsdp_magic.core.protocol import JoinRequest
from fsdp_magic.core.units import ranks_named
from fsdp_magic.engine.groups import Groups, keep_default_group
from fsdp_magic.engine.parallel.torch_private import align_group_count
from fsdp_magic.engine.randomness import seed_all
from fsdp_magic.engine.swappable_group import BACKEND, Surroundings
from fsdp_magic.engine.vote import Vote

DATA_PARALLEL = "dp"
REPLICATE, SHARD = "replicate", "shard"
_SETTLE_SECONDS, _LOOK_SECONDS = 0.2, 0.002
_COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Our own watch ends a wait; torch's timeout would end a person's debugger session."""


class World:
    """A joined world.

    Attributes:
        request: what the kernel said.
        device: what this rank computes on.
        page: the shared page of this host.
        groups: every process group made here.
        mesh: one axis, ``dp``, over all ranks.
        vote: how ranks agree on the host.
    """

    def __init__(self, request: JoinRequest) -> None:
        """Join.

        Collective: every rank must make its own.
        """
        self.request = request
        self.rank = request.rank
        self.world_size = request.world_size
        os.environ.update(_torchrun_environment(request))
        self.device = _device(request)
        self.page = Page(_mapped_page(request))
        self.groups = Groups(
            Surroundings(
                cuda_transport=request.transport,
                directory=Path(request.directory),
                given_up=lambda generation: self.page.released_generation >= generation,
                settle=self._settle,
            ),
            generation=request.generation,
        )
        store = FileStore(str(Path(request.directory, "rendezvous")), request.world_size)
        dist.init_process_group(
            BACKEND,
            store=store,
            rank=request.rank,
            world_size=request.world_size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        # without a mesh of its own kind, torch would move a CPU model to a GPU it sees
        self.mesh: DeviceMesh = init_device_mesh(
            self.device.type, (request.world_size,), mesh_dim_names=(DATA_PARALLEL,)
        )
        self._hybrid_meshes: dict[int, DeviceMesh] = {}
        self.groups.end_start()
        keep_default_group()
        if request.generation > 1:  # the others recover meanwhile, and do this too
            self._begin_to_agree()
        self.vote = self._fresh_vote()
        self._gradients_group: dist.ProcessGroup | None = None
        self.page.note_idle(self.rank)
        seed_all(request.seed)

    def hybrid_mesh(self, shard_size: int) -> DeviceMesh:
        """Return the mesh of two axes, ``replicate`` and ``shard``, for so many ranks a shard.

        Collective: every rank must call this, the first time for a size; later ones only look.
        """
        if shard_size not in self._hybrid_meshes:
            shape = (self.world_size // shard_size, shard_size)
            self._hybrid_meshes[shard_size] = init_device_mesh(
                self.device.type, shape, mesh_dim_names=(REPLICATE, SHARD)
            )
        return self._hybrid_meshes[shard_size]

    @property
    def released(self) -> bool:
        """Whether the transports of this generation were given up."""
        return self.page.released_generation >= self.groups.generation

    def gradients_group(self) -> dist.ProcessGroup:
        """Return the group of whole gradients, which are reduced while a backward runs.

        It is their own, so that collectives of the person's code never come in between.

        Collective: every rank must call this.
        """
        if self._gradients_group is None:
            self._gradients_group = dist.new_group()
        return self._gradients_group

    def release(self) -> None:
        """Free every rank that waits for another; safe from any thread."""
        self.page.release(self.groups.generation)
        self.groups.disconnect()

    def _settle(self, generation: int, quiet_here: Callable[[], bool]) -> None:
        """Wait until no rank sends anything any more, but not long for one that stands still."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        looks = 0
        while time.monotonic() < deadline:
            looks = looks + 1 if quiet_here() else 0  # twice: gloo may be about to answer
            if looks > 1:
                self.page.note_quiet(self.rank, generation)
                if self.page.all_quiet(generation):
                    return
            time.sleep(_LOOK_SECONDS)

    def reconnect(self, generation: int, *, replaced: tuple[int, ...] = ()) -> None:
        """Replace every transport.

        Collective: every rank must call this, with the same generation.

        Args:
            generation: of the transports to come.
            replaced: ranks with fresh engines, which join meanwhile.
        """
        if replaced:
            ranks = ranks_named(replaced)
            many = len(replaced) > 1
            fresh = "fresh engines, which are" if many else "a fresh engine, which is"
            self.groups.lose_later_ones(
                f"this process group was made before {ranks} had {fresh} not in it; "
                "make it again on every rank: dist.new_group()"
            )
            self._hybrid_meshes.clear()  # a model that is built again makes its own
            self._gradients_group = None
        self.groups.reconnect(generation)
        self._begin_to_agree()
        self.vote = self._fresh_vote()

    def _begin_to_agree(self) -> None:
        """Count votes and groups like the others from here on.

        Collective: every rank must call this.
        """
        self.page.clear_ballots(self.rank)
        align_group_count()  # also: nobody votes before all have cleared their ballots

    def names(self) -> dict[str, Any]:
        """Return the names that every cell finds."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "dp_rank": self.rank,
            "dp_size": self.world_size,
            "device": self.device,
        }

    def _fresh_vote(self) -> Vote:
        return Vote(
            self.page,
            self.rank,
            world_size=self.world_size,
            generation=self.groups.generation,
        )


def _torchrun_environment(request: JoinRequest) -> dict[str, str]:
    """Return what torchrun would have set, so that libraries find their place.

    Nothing listens at MASTER_PORT: the process group is there already.
    """
    environment = {
        "RANK": str(request.rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_RANK": str(request.cuda_index if request.device == "cuda" else request.local_rank),
        "LOCAL_WORLD_SIZE": str(request.local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    if request.device == "cpu":
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def _device(request: JoinRequest) -> torch.device:
    """Return the rank's device, made current in this thread and capped to its share."""
    if request.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", request.cuda_index or 0)
    torch.cuda.set_device(device)
    if request.gpu_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(request.gpu_fraction, device)
    return device


def _mapped_page(request: JoinRequest) -> memoryview:
    """Map the page that the kernel made; it stays mapped as long as the engine lives."""
    with open(Path(request.directory, "page"), "r+b") as file:
        mapped = mmap.mmap(file.fileno(), page_bytes(request.world_size))
    return memoryview(mapped).cast("Q")
