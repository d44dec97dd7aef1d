"""KERNEL: what engines say while they are followed."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ipyparallel

from fsdp_magic.core.cell_output import PRINTED_KEY, PrintedReport
from fsdp_magic.core.protocol import PROGRESS_KEY
from fsdp_magic.core.reply import Reply
from fsdp_magic.core.telemetry import ProgressReport
from fsdp_magic.core.whereabouts import WHERE_KEY, WhereReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """An engine printed something. ``stream`` is ``stdout`` or ``stderr``."""

    engine_id: int
    stream: str
    report: PrintedReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Displayed:
    """An engine displayed something.

    Attributes:
        bundle: by MIME type.
        metadata: of the bundle.
        display_id: under which the engine may display something else later; empty: it may not.
        update: whether it takes the place of what has the same ``display_id``.
    """

    engine_id: int
    bundle: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str = ""
    update: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """An engine's cell called ``clear_output``; with ``wait`` when something new comes."""

    engine_id: int
    wait: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """An engine published the progress of a run."""

    engine_id: int
    report: ProgressReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """An engine said where it is."""

    engine_id: int
    report: WhereReport


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


Event = Printed | Displayed | Cleared | Progressed | Located | Answered | Died


class Events(queue.Queue[Event]):
    """Where what engines say is waited for.

    Not a ``SimpleQueue``: where a signal arrives as the timeout of its ``get`` runs out, Python
    3.11 and 3.12 go on waiting without any timeout, and an interrupt would be lost. Source:
    Modules/_queuemodule.c, which takes a negative rest of the timeout for "for ever".
    """

    def reports(self, engine_ids: set[int], *, seconds: float) -> dict[int, Any]:
        """Wait for engines' answers, and return the reports that come in time, by engine id."""
        reports: dict[int, Any] = {}
        waiting, deadline = set(engine_ids), time.monotonic() + seconds
        with suppress(queue.Empty):
            while waiting and (left := deadline - time.monotonic()) > 0:
                event = self.get(timeout=left)
                match event:
                    case Answered(reply=Reply(failure=None) as reply):
                        reports[event.engine_id] = reply.report
                        waiting.discard(event.engine_id)
                    case Answered() | Died():
                        waiting.discard(event.engine_id)
        return reports


def event_of(engine_id: int, message: Mapping[str, Any]) -> Event | None:
    """Return what a message on an engine's publishing channel says; None: nothing for us."""
    kind, content = message["header"]["msg_type"], message["content"]
    match kind:
        case "stream":
            return Printed(engine_id=engine_id, stream=content["name"], report=_printed(content))
        case "display_data" | "update_display_data":
            return Displayed(
                engine_id=engine_id,
                bundle=content["data"],
                metadata=content["metadata"],
                display_id=content.get("transient", {}).get("display_id", ""),
                update=kind == "update_display_data",
            )
        case "clear_output":
            return Cleared(engine_id=engine_id, wait=bool(content.get("wait")))
        case "data_message" if PROGRESS_KEY in content["keys"]:
            data, _ = ipyparallel.serialize.deserialize_object(message["buffers"])
            return Progressed(engine_id=engine_id, report=data[PROGRESS_KEY])
        case "data_message" if WHERE_KEY in content["keys"]:
            data, _ = ipyparallel.serialize.deserialize_object(message["buffers"])
            return Located(engine_id=engine_id, report=data[WHERE_KEY])
    return None


def _printed(content: Mapping[str, Any]) -> PrintedReport:
    """Return what was printed."""
    report = content.get(PRINTED_KEY)
    if report is None:
        return PrintedReport(parts=(content["text"],))
    bars = report["bars"]
    return PrintedReport(
        **{
            **report,
            "parts": tuple(report["parts"]),
            "bars": None if bars is None else tuple((number, text) for number, text in bars),
        }
    )
