"""ENGINE: the steps of one strategy in a comparison: their time, and their memory at its height.

What a step holds is told from what the process holds anyway. Libraries keep workspaces from the
first use of a precision on, and compilers what they compiled, for the rest of the process. So the
first step is for them to settle, memory is looked at in the steps that warm up after it, and what
is left when model and cell are gone is not counted: it is the same in whatever order strategies
run.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import torch

from fsdp_magic.core.comparison import SETTLING_STEPS, WARM_UP_STEPS, CompareReport
from fsdp_magic.core.telemetry import MemorySample, RunReport
from fsdp_magic.engine import telemetry
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.state import State
from fsdp_magic.engine.training import TrainingRun

_LOOK_SECONDS, _LOOKING_SECONDS = 0.0005, 0.2


class Measurement:
    """Finds the height of memory in the steps that warm up, and measures the time of the others.

    Args:
        run: of the steps.
        device: waited for where a time is taken.

    Attributes:
        steps: that were measured; below 0: those that are still to warm up.
        seconds: that they took; None: there was none.
    """

    def __init__(self, run: TrainingRun, device: torch.device) -> None:
        self._run = run
        self._device = device
        self._began: float | None = None
        self._settling_peak: MemorySample | None = None
        self.steps = -WARM_UP_STEPS
        self.seconds: float | None = None

    def tick(self, now: float) -> None:
        """Look at memory all the while in the steps that warm up; from the service thread.

        The height of a short step lies between two ticks.
        """
        while self.steps < 0 and time.monotonic() < now + _LOOKING_SECONDS:
            self._run.look_at_memory()
            time.sleep(_LOOK_SECONDS)

    def step_done(self) -> None:
        """Note that a step, and all that followed it, is done."""
        self.steps += 1
        if self.steps == SETTLING_STEPS - WARM_UP_STEPS:
            self._settling_peak = self._run.forget_peak()
        if self.steps < 0:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        else:
            self.seconds = now - self._began

    def made(self, cell: Cell, engine: State) -> CompareReport:
        """Take the steps and return what they were like.

        Collective: every rank must call this.
        """
        self._run.prepare(cell, evaluation_cell=None, kept=engine)
        self._run.follow_steps(self.step_done)
        self._run.steps()
        report = self._run.report()
        assert report is not None
        return CompareReport(
            run=replace(self._with_peak(report), notes=()),
            seconds=self.seconds,
            measured_steps=max(0, self.steps),
        )

    def _with_peak(self, report: RunReport) -> RunReport:
        """Return the report; where data ended while libraries settled, with the peak of that."""
        if self._settling_peak is None or report.steps > SETTLING_STEPS:
            return report
        return replace(report, peak_memory=self._settling_peak)


def idle_bytes() -> int:
    """Return what the process holds when models and cells are gone."""
    gc.collect()  # modules and what spread them hold themselves in cycles
    return telemetry.memory().allocated_bytes
