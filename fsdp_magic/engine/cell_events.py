"""ENGINE: what IPython says around each cell, said around ours: autoreload and others listen.

Source: ``InteractiveShell.run_cell``, IPython 8 and 9.
"""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

from fsdp_magic.engine.interrupts import INTERRUPTS


class CellEvents:
    """The events around one cell.

    Args:
        shell: the engine's IPython.
        code: the cell; None: it is none, but an expression of ours, and most need not know.
    """

    def __init__(self, shell: Any, code: str | None) -> None:
        self._events = shell.events
        self._result: ExecutionResult | None = None
        callbacks = shell.events.callbacks
        if code is not None and (callbacks["pre_run_cell"] or callbacks["post_run_cell"]):
            self._result = ExecutionResult(_info(shell, code))  # type: ignore[no-untyped-call]

    def before(self) -> None:
        """Say that the cell begins; what listens may run the person's code."""
        with INTERRUPTS.allowed():
            self._events.trigger("pre_execute")
            if self._result is not None:
                self._events.trigger("pre_run_cell", self._result.info)

    def failed(self, error: BaseException) -> None:
        """Note how the cell failed."""
        if self._result is not None:
            self._result.error_in_exec = error

    def after(self) -> None:
        """Say that the cell is over."""
        self._events.trigger("post_execute")  # matplotlib shows its figures then
        if self._result is not None:
            self._events.trigger("post_run_cell", self._result)


def _info(shell: Any, code: str) -> ExecutionInfo:
    info = ExecutionInfo(  # type: ignore[no-untyped-call]
        raw_cell=code, store_history=False, silent=False, shell_futures=True, cell_id=None
    )
    try:
        info.transformed_cell = shell.transform_cell(code)
    except SyntaxError:  # the cell's own compilation tells
        info.transformed_cell = None
    return info
