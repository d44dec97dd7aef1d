"""Made-up records of many ranks, and a run that is followed without engines."""

from __future__ import annotations

import math
import time
from typing import Any

from fsdp_magic.core.placement import ParameterPlacement, Placement, shard_rows
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import (
    DeviceSample,
    MemorySample,
    ProgressReport,
    RankStatus,
    StepRecords,
)
from fsdp_magic.core.units import GIB
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.training import TrainingPanel
from fsdp_magic.panels.training_view import TrainingView

_TICK_SECONDS, _REPORT_SECONDS, _STEPS_A_REPORT = 0.05, 0.5, 25
_BUSY = DeviceSample(utilisation_percent=93, temperature_celsius=61, power_watts=512)


def memory(rank: int) -> MemorySample:
    """Return a GPU that is two thirds full."""
    allocated = (36 + rank % 7) * GIB
    return MemorySample(
        allocated_bytes=allocated,
        reserved_bytes=allocated + 2 * GIB,
        used_bytes=allocated + 3 * GIB,
        capacity_bytes=80 * GIB,
        peak_allocated_bytes=allocated + 5 * GIB,
        parameter_bytes=6 * GIB,
        gradient_bytes=6 * GIB,
        optimizer_bytes=24 * GIB,
    )


def report(rank: int, *, first: int, steps: int) -> ProgressReport:
    """Return what a rank reports of a stretch of steps."""
    losses = tuple(3 * math.exp(-step / 20_000) for step in range(first, first + steps))
    return ProgressReport(
        run_id=1,
        rank=rank,
        steps=first + steps,
        total_steps=200_000,
        records=StepRecords(
            first=first,
            losses=losses,
            grad_norms=(0.5,) * steps,
            samples=(8,) * steps,
            tokens=(4096,) * steps,
        ),
        memory=memory(rank),
        peak_memory=memory(rank),
        activity=_BUSY,
        seconds=0.02 * (first + steps),
        device_name="NVIDIA H100 80GB HBM3",
        first_step=0,
        micro_batch_size=8,
    )


def run_of(world: int, losses: int) -> Run:
    """Return a run of so many steps."""
    run = Run(run_id=1, world_size=world, accumulate=1)
    for rank in range(world):
        run.add(report(rank, first=0, steps=losses))
    return run


def training_view(world: int) -> TrainingView:
    """Return a frame of a run of 10,000 steps."""
    return TrainingPanel(run_of(world, 10_000), TrainSpec(), show=False).view()


def ranks_status(world: int) -> list[RankStatus]:
    """Return the ranks of hosts with eight GPUs each."""
    return [
        RankStatus(
            rank=rank,
            local_rank=rank % 8,
            host=f"node-{rank // 8}",
            pid=4000 + rank,
            device=f"cuda:{rank % 8}",
            device_name="NVIDIA H100 80GB HBM3",
            memory=memory(rank),
            activity=_BUSY,
            models=("model",),
            steps=640,
        )
        for rank in range(world)
    ]


def placement(world: int) -> Placement:
    """Return 48 blocks of 12 tensors and four tensors around them, as GPT-2 XL has."""
    named = {
        f"h.{block}.part_{part}": (1600, 100 + part) for block in range(48) for part in range(12)
    }
    around = {f"around_{part}": (50_257 - part, 1600) for part in range(4)}
    return Placement(
        model="model",
        strategy="full_shard",
        world_size=world,
        parameters=tuple(
            ParameterPlacement(
                name=name,
                shape=shape,
                local_shapes=tuple(
                    (shard_rows(rows=shape[0], world_size=world, rank=rank), shape[1])
                    for rank in range(world)
                ),
                dtype="float32",
                element_bytes=4,
                kind="sharded",
                unit="",
            )
            for name, shape in {**around, **named}.items()
        ),
        notes=(),
    )


def follow(*, seconds: float, losses: int, show: bool) -> None:
    """Follow a run of eight ranks as the notebook does, with or without its panel."""
    run = run_of(8, losses)
    panel: Any = TrainingPanel(run, TrainSpec(), show=show)
    panel.view()
    ends, reports_at = time.monotonic() + seconds, 0.0
    while (now := time.monotonic()) < ends:
        if now >= reports_at:
            reports_at = now + _REPORT_SECONDS
            for rank in range(8):
                run.add(report(rank, first=losses, steps=_STEPS_A_REPORT))
            losses += _STEPS_A_REPORT
        panel.tick()
        time.sleep(_TICK_SECONDS)
