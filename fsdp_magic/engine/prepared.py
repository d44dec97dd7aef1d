"""ENGINE: what a training run works with, once it was prepared."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.engine.aftermath import AfterSteps
from fsdp_magic.engine.data import Data
from fsdp_magic.engine.guards import Guards
from fsdp_magic.engine.loop import StepLoop
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.snapshots import RunSnapshots
from fsdp_magic.engine.telemetry import MemoryWatch
from fsdp_magic.engine.trained import Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run works with.

    Attributes:
        models: the sharded ones.
        trained: what the bound optimizers hold.
        data: None: the cell brings its own.
        memory: what the service thread looks at.
        guards: of the cell's calls.
        loop: takes the steps.
        after: what follows each step.
        snapshots: made while it goes on; None: nobody asked for any.
        total_steps: of this run; None: to the end of the data.
    """

    models: list[ShardedModel]
    trained: Trained
    data: Data | None
    memory: MemoryWatch
    guards: Guards
    loop: StepLoop
    after: AfterSteps
    snapshots: RunSnapshots | None
    total_steps: int | None
