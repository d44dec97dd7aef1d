"""What ranks are asked and report where steps are measured and taken back; data only, pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.specs import ModelSpec, TrainSpec
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.telemetry import RunReport

WARM_UP_STEPS = 2
"""Not timed; in those that do not settle memory is looked at."""
SETTLING_STEPS = 1
"""The first of them make the optimizer's state, and libraries allocate what they keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAsideRequest:
    """Set the models aside as they are, to spread them otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAsideReport:
    """How the models that are set aside were spread.

    Attributes:
        specs: of each model.
        ranks_on_host: ranks of this host.
    """

    specs: tuple[ModelSpec, ...]
    ranks_on_host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBackRequest:
    """Have everything as it was when the models were set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """Take steps, from the weights that were kept, and have those back afterwards.

    Attributes:
        code: the training cell.
        name: its file name in tracebacks.
        spec: its options, with the steps to take: those that warm up, and those measured.
        variant: how the models are spread that were set aside; None: they are as they are.
        room_bytes: that may be allocated on a CPU; None: what its limit says.
        moves_schedulers: whether learning rates follow their schedulers.
    """

    code: str
    name: str
    spec: TrainSpec
    variant: Variant | None
    room_bytes: int | None = None
    moves_schedulers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReport:
    """What one rank measured under one strategy.

    Attributes:
        run: the losses of all steps, the samples, and memory at its height with what it is of.
        seconds: of the steps that were measured; None: the data ended before any.
        measured_steps: how many those were.
        idle_bytes: what the process still held when model and cell were gone: data, and
            what libraries keep. It is part of what ``run`` says was allocated.
    """

    run: RunReport
    seconds: float | None
    measured_steps: int
    idle_bytes: int = 0
