"""A plan: peak memory of any micro-batch size and the largest that fits, by strategy; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_magic.core.planning.device import Device
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.step_trace import StepTrace
from fsdp_magic.core.planning.strategies import ledger_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The largest micro-batch size, as an interval; the safe end is recommended.

    Attributes:
        safe: fits with the allocator's fragmentation; 0: not even one sample fits.
        ideal: fits if no memory were lost to fragmentation.
    """

    safe: int
    ideal: int


@dataclass(slots=True, kw_only=True)
class StrategyPlan:
    """What one strategy needs on a rank.

    Attributes:
        name: as ``--strategies`` names it: ``full_shard+bf16+cpu_offload``.
        trace: of the step, in its precision.
        setting: how it is spread.
        ledger: what a rank takes and gives back over two steps.
    """

    name: str
    trace: StepTrace
    setting: Setting
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = ledger_of(self.trace, self.setting)

    def peak_bytes(self, micro_batch_size: int) -> int:
        """Return the most bytes allocated on a rank."""
        return round(self.ledger.peak(micro_batch_size))

    def largest(self, device: Device) -> Interval:
        """Return the largest micro-batch size for a device."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Plans by strategy, for one device.

    Attributes:
        device: what it is for.
        world_size: ranks.
        strategies: by name, in the order asked for.
    """

    device: Device
    world_size: int
    strategies: Mapping[str, StrategyPlan]

    @property
    def max_micro_batch_size(self) -> dict[str, int]:
        """The largest micro-batch size of each strategy that is safe; 0: not even one sample."""
        return {name: plan.largest(self.device).safe for name, plan in self.strategies.items()}

    def peak_bytes(self, strategy: str, micro_batch_size: int) -> int:
        """Return the most bytes allocated on a rank."""
        return self.strategies[strategy].peak_bytes(micro_batch_size)
