"""KERNEL: from the options of ``%fsdp_init`` and this machine to the world that is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.protocol import DeviceKind, JoinRequest, TransportKind
from fsdp_magic.core.specs import InitSpec, ModelSpec
from fsdp_magic.notebook.devices import gpu_count

DEFAULT_CPU_ENGINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """The world of one host.

    Attributes:
        n: number of engines, and ranks.
        device: what they compute on.
        gpus: GPUs there are; several engines share one if there are fewer than ``n``.
        memory_limit_bytes, seed, defaults: as asked.
        lost_models: names of the models that went with the engines before these.
    """

    n: int
    device: DeviceKind
    gpus: int
    memory_limit_bytes: int | None
    seed: int
    defaults: ModelSpec
    lost_models: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether several engines share a GPU."""
        return self.device == "cuda" and self.n > self.gpus

    @property
    def forked(self) -> bool:
        """Whether one process makes the engines; not those that use CUDA, each is fresh."""
        return self.device == "cpu"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for every engine; a person's own values stand."""
        wanted = {
            "OMP_NUM_THREADS": str(max(1, usable_cores() // self.n)),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if self.device == "cuda":
            wanted |= {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",
                "NCCL_RAS_ENABLE": "0",
            }
        return {name: value for name, value in wanted.items() if name not in os.environ}

    def join_request(
        self, rank: int, *, directory: str, snapshots: tuple[str, ...] = ()
    ) -> JoinRequest:
        """Return what a rank is told when it joins."""
        transport: TransportKind = "gloo" if self.device == "cpu" or self.shared else "nccl"
        engines_per_gpu = -(-self.n // self.gpus) if self.shared else 1
        return JoinRequest(
            rank=rank,
            world_size=self.n,
            local_rank=rank,
            local_world_size=self.n,
            directory=directory,
            device=self.device,
            cuda_index=rank % self.gpus if self.device == "cuda" else None,
            transport=transport,
            memory_limit_bytes=self.memory_limit_bytes,
            gpu_fraction=1 / engines_per_gpu if self.shared else None,
            seed=self.seed,
            defaults=self.defaults,
            snapshots=snapshots,
            lost_models=self.lost_models,
        )


def plan_world(spec: InitSpec) -> WorldPlan:
    """Return the world that the options ask for on this machine.

    Raises:
        UsageError: if it has not the GPUs for it.
    """
    gpus = gpu_count() if spec.device != "cpu" and spec.memory_limit is None else 0
    if spec.device == "cuda" and gpus == 0:
        raise UsageError("--device cuda found no GPU here; use --device cpu, or leave it out")
    device: DeviceKind = "cuda" if gpus else "cpu"
    n = spec.n if spec.n is not None else gpus or DEFAULT_CPU_ENGINES
    if device == "cuda" and n > gpus and not spec.share_gpus:
        raise UsageError(
            f"-n {n} asks for {n} engines and this machine has {gpus} GPU{'s'[: gpus != 1]}; use "
            f"-n {gpus}, --share-gpus to let them share, or --device cpu"
        )
    if spec.share_gpus and device == "cpu":
        raise UsageError("--share-gpus found no GPU here to share; leave it out")
    return WorldPlan(
        n=n,
        device=device,
        gpus=gpus,
        memory_limit_bytes=spec.memory_limit_bytes,
        seed=spec.seed,
        defaults=spec.defaults,
    )


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, and its group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))
