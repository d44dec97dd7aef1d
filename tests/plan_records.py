"""A small traced step, written by hand, and plans of it."""

from __future__ import annotations

from typing import Any

from fsdp_magic.core.planning.device import Device
from fsdp_magic.core.planning.memory_plan import MemoryPlan, StrategyPlan
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Event,
    Freed,
    OptimizerAllocated,
    OptimizerTrace,
    Reached,
    Size,
    StepTrace,
    TracedModule,
    TracedParameter,
)
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.units import MIB

BLOCKS = 4
WIDTH, CLASSES = 1024, 4096


def step_trace(**changes: Any) -> StepTrace:
    """Four blocks that each keep 2 MiB a sample, and a head whose scores take 8 MiB a sample."""
    names = [f"blocks.{number}" for number in range(BLOCKS)]
    shapes = {**{f"{name}.weight": (WIDTH, WIDTH) for name in names}, "head.weight": (CLASSES, 256)}
    modules = {
        name: TracedModule(class_name="Block", parameters=(f"{name}.weight",)) for name in names
    }
    first = [
        OptimizerAllocated(number, name, 8, 0, "optimizer") for number, name in enumerate(shapes)
    ]
    later = [
        OptimizerAllocated(100 + number, name, 4, 0, "temporary")
        for number, name in enumerate(shapes)
    ]
    passing = (*later, *(Freed(each.id) for each in later))
    values: dict[str, Any] = {
        "parameters": {name: TracedParameter(name=name, shape=s) for name, s in shapes.items()},
        "modules": {
            "": TracedModule(class_name="Model"),
            **modules,
            "head": TracedModule(class_name="Linear", parameters=("head.weight",)),
        },
        "micro_step": tuple(_micro_step(names)),
        "optimizer": OptimizerTrace(name="AdamW", first=(*first, *passing), later=passing),
        "units": {"blocks": tuple((name,) for name in names)},
        "flops": Size(0, 1e12),
        "moved": Size(1e9, 1e8),
    }
    return StepTrace(**(values | changes))


def _micro_step(names: list[str]) -> list[Event]:
    """Forward keeps what backward frees, a block at a time."""
    events: list[Event] = [Reached("forward", "")]
    for number, name in enumerate(names):
        kept = Allocated(number, Size(0, 2 * MIB), "activation", f"{name}.mlp", "aten::mm")
        events += [Reached("forward", name), kept, Reached("forward_end", name)]
    scores = Allocated(10, Size(0, 8 * MIB), "activation", "head", "aten::mm")
    loss = Allocated(11, Size(4), "activation", "", "aten::nll_loss")
    events += [Reached("forward", "head"), scores, Reached("forward_end", "head"), loss]
    events += [Reached("forward_end", ""), Reached("backward")]
    slope = Allocated(12, Size(0, 8 * MIB), "temporary", "head", "aten::mm")
    events += [slope, Reached("gradient", "head.weight"), Freed(12), Freed(10), Freed(11)]
    for number, name in reversed(list(enumerate(names))):
        events += [Reached("module_backward", name), Reached("gradient", f"{name}.weight")]
        events.append(Freed(number))
    return [*events, Reached("micro_step_end")]


def device(**changes: Any) -> Device:
    """A GPU with 256 MiB for tensors."""
    values: dict[str, Any] = {
        "name": "256 MiB",
        "capacity_bytes": 256 * MIB,
        "context_bytes": 0,
        "communication_bytes": 0,
    }
    return Device(**(values | changes))


def strategy_plan(name: str, *, world_size: int = 2, **changes: Any) -> StrategyPlan:
    variant = Variant.parsed(name)
    fields = {key: value for key, value in variant.changes if key in ("shard_size", "cpu_offload")}
    setting = Setting(strategy=variant.strategy, world_size=world_size, **fields)  # type: ignore[arg-type]
    return StrategyPlan(name=variant.name, trace=step_trace(**changes), setting=setting)


def memory_plan(*names: str, world_size: int = 2, **changes: Any) -> MemoryPlan:
    """A plan of ``ddp`` and ``full_shard``, or of those that are named."""
    plans = [strategy_plan(name, world_size=world_size) for name in names or ("ddp", "full_shard")]
    values: dict[str, Any] = {
        "device": device(),
        "world_size": world_size,
        "strategies": {plan.name: plan for plan in plans},
    }
    return MemoryPlan(**(values | changes))
