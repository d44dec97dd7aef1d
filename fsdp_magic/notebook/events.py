"""KERNEL: what engines say while they are followed."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from fsdp_magic.core.protocol import Reply
from fsdp_magic.core.telemetry import ProgressReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """An engine printed something. ``stream`` is ``stdout`` or ``stderr``."""

    engine_id: int
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """An engine published the progress of a run."""

    engine_id: int
    report: ProgressReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An engine answered, and everything it printed before has arrived."""

    engine_id: int
    reply: Reply | BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """An engine's process ended. ``exit_code`` is negative for a signal."""

    engine_id: int
    exit_code: int | None


Event = Printed | Progressed | Answered | Died


class Events(queue.Queue[Event]):
    """Where what engines say is waited for.

    Not a ``SimpleQueue``: where a signal arrives as the timeout of its ``get`` runs out, Python
    3.11 and 3.12 go on waiting without any timeout, and an interrupt would be lost. Source:
    Modules/_queuemodule.c, which takes a negative rest of the timeout for "for ever".
    """
