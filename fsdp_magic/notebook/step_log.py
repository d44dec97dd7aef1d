"""KERNEL: handing every step's numbers to a function of the notebook (``wandb.log``, say)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_magic.notebook.run import Run


class StepLog:
    """Calls ``function({...}, step=n)`` once for every step that all ranks have reported.

    An evaluation is handed on as ``eval_loss`` and ``eval_`` with each metric, with the number of
    steps done before it as its step.

    Args:
        run: whose steps.
        function: the person's; None: nothing is called.
    """

    def __init__(self, run: Run, function: Callable[..., Any] | None) -> None:
        self._run = run
        self._function = function
        self._logged = 0
        self._evaluated = 0

    def tick(self) -> None:
        """Hand on what has arrived since the last time.

        A function that raises is not called again: the run goes on, and says so.
        """
        if self._function is None:
            return
        try:
            self._hand_on(self._function)
        except Exception as error:  # the person's own function may raise anything
            self._function = None
            step = self._run.first_step + max(self._logged - 1, 0)
            self._run.notes.append(
                f"--log raised {type(error).__name__}: {error}; it was not called again after "
                f"step {step:,}"
            )

    def _hand_on(self, function: Callable[..., Any]) -> None:
        run = self._run
        for index in range(self._logged, run.steps):
            self._hand_on_evaluations(function, until=run.first_step + index)
            self._logged = index + 1  # counted first, so that one which raises is not tried again
            function(run.values(index), step=run.first_step + index)
        self._hand_on_evaluations(function, until=run.first_step + run.steps)

    def _hand_on_evaluations(self, function: Callable[..., Any], *, until: int) -> None:
        """Hand on evaluations made before a step, so that the steps handed on never go back."""
        for record in self._run.evaluations[self._evaluated :]:
            if record.step > until:
                return
            self._evaluated += 1
            values = {f"eval_{name}": value for name, value in record.metrics.items()}
            if record.loss is not None:
                values["eval_loss"] = record.loss
            function(values, step=record.step)
