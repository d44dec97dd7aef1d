"""KERNEL: watching engines and their controller, and noting how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fsdp_magic.notebook.deaths import Death, Deaths, last_words


class Watch:
    """Notes the ends of processes, at once.

    Args:
        on_death: called with an engine's id and exit code, from another thread.
        on_controller_death: called so when the controller has ended.

    Attributes:
        deaths: of engines, also of those that were replaced.
        controller_death: how the controller ended; None: it is there.
        known: ids of the engines that are or were watched.
    """

    def __init__(
        self,
        *,
        on_death: Callable[[int, int | None], None],
        on_controller_death: Callable[[], None],
    ) -> None:
        self._on_death = on_death
        self._on_controller_death = on_controller_death
        self.deaths = Deaths()
        self.controller_death: Death | None = None
        self.known: set[int] = set()

    def engine(self, engine_id: int, launcher: Any) -> None:
        """Watch an engine from now on; safe to call twice."""
        if engine_id in self.known:
            return
        self.known.add(engine_id)
        self.deaths.expect(engine_id, launcher.pid)
        launcher.on_stop(partial(self._note, engine_id, launcher))

    def controller(self, launcher: Any) -> None:
        """Watch a controller from now on, in the place of one that has ended."""
        self.controller_death = None
        launcher.on_stop(partial(self._note_controller, launcher))

    def close(self) -> None:
        """Let go of what is open for it."""
        self.deaths.close()

    def _note(self, engine_id: int, launcher: Any, data: Mapping[str, Any]) -> None:
        code = data.get("exit_code")
        self.deaths.note(engine_id, code, launcher.get_output())
        self._on_death(engine_id, code)

    def _note_controller(self, launcher: Any, data: Mapping[str, Any]) -> None:
        log = last_words(launcher.get_output())
        self.controller_death = Death(code=data.get("exit_code"), log=log)
        self._on_controller_death()
