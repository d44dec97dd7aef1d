"""KERNEL: handing every step's numbers to a function of the notebook (``wandb.log``, say)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_magic.notebook.run import Run


class StepLog:
    """Calls ``function({...}, step=n)`` once for every step that all ranks have reported.

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
            self._run.notes.append(
                f"--log raised {type(error).__name__}: {error}; nothing was logged from step "
                f"{self._run.first_step + self._logged} on"
            )

    def _hand_on(self, function: Callable[..., Any]) -> None:
        run = self._run
        for step in range(self._logged, run.steps):
            function(run.values(step), step=run.first_step + step)
            self._logged = step + 1
        for record in run.evaluations[self._evaluated :]:
            values = {f"eval_{name}": value for name, value in record.metrics.items()}
            if record.loss is not None:
                values["eval_loss"] = record.loss
            function(values, step=record.step)
            self._evaluated += 1
