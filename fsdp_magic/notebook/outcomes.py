"""KERNEL: from the ranks' replies to what a person gets: outputs, or the error that tells why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_magic.core.cell_output import CellOutput
from fsdp_magic.core.errors import CellFailedError, OutOfMemoryOnRankError, RanksDivergedError
from fsdp_magic.core.reply import Failure, Reply
from fsdp_magic.core.units import ranks_named
from fsdp_magic.notebook.output import Output
from fsdp_magic.panels import errors as error_panel
from fsdp_magic.panels import waiting
from fsdp_magic.panels.waiting import WaitingView


def outputs(
    replies: Mapping[int, Reply],
    output: Output,
    *,
    result: Callable[[Any], str | None] | None = None,
) -> list[CellOutput]:
    """Return what a cell left on each rank.

    Args:
        replies: by rank.
        output: what the ranks printed.
        result: a rank's report -> the text of its last expression; None: there is none.
    """
    return [
        CellOutput(
            rank=rank,
            stdout=output.collected(rank, "stdout"),
            stderr=output.collected(rank, "stderr"),
            result=None if result is None else result(reply.report),
        )
        for rank, reply in sorted(replies.items())
    ]


def failure_of(
    replies: Mapping[int, Reply],
    output: Output,
    *,
    timeout: float | None = None,
    hopeless: WaitingView | None = None,
) -> CellFailedError:
    """Return the exception that tells why a cell failed.

    Args:
        replies: by rank.
        output: what the ranks printed.
        timeout: seconds after which it was stopped; None: it was not.
        hopeless: where the ranks were, if it was stopped because each waited for others that
            could never come.
    """
    failures = {r: reply.failure for r, reply in replies.items() if reply.failure is not None}
    own = {r: f for r, f in failures.items() if f.kind != "released"} or failures
    released = tuple(sorted(set(failures) - set(own)))
    diverged = waiting.diverged(failures)
    text = diverged or _refusal(own, everywhere=len(own) == len(replies))
    lines = text.splitlines()
    if not text:
        text = error_panel.text(own, released=released)
        lines = error_panel.coloured(own, released=released)
    if hopeless is not None and not diverged:
        text = waiting.hopeless(hopeless)
        lines = text.splitlines()
    if timeout is not None:
        stopped = f"the cell was stopped after {timeout:g} s (--timeout)"
        if all(failure.kind in ("interrupted", "released") for failure in own.values()):
            lines = waiting.text(_places(replies)).splitlines()
        lines = [stopped, *lines]
        text = "\n".join(lines)
    full = any(failure.kind == "out_of_memory" for failure in own.values())
    kind = OutOfMemoryOnRankError if full else CellFailedError
    kind = RanksDivergedError if diverged else kind
    error = kind(text, exceptions=own, outputs=outputs(replies, output), rendered=lines)
    if diverged or hopeless is not None:
        error.summary = waiting.DIVERGED if diverged else waiting.HOPELESS
    return error


def waiting_at_the_end(replies: Mapping[int, Reply]) -> list[str]:
    """Return where the ranks of an interrupted cell were, if any waited for another."""
    view = _places(replies)
    waited = any(where is not None and where.missing for where in view.places.values())
    return waiting.text(view).splitlines() if waited else []


def _places(replies: Mapping[int, Reply]) -> WaitingView:
    """Return where the ranks were when they were stopped; those that finished have left."""
    places = {}
    for rank, reply in sorted(replies.items()):
        failure = reply.failure
        if failure is None or failure.where is not None:
            places[rank] = None if failure is None else failure.where
    return WaitingView(places=places)


def _refusal(failures: Mapping[int, Failure], *, everywhere: bool) -> str:
    """Return one line if we refused the same thing on every rank that failed, else nothing."""
    messages = {failure.message for failure in failures.values()}
    if len(messages) > 1 or any(failure.kind != "usage" for failure in failures.values()):
        return ""
    ranks = "" if everywhere else f"{ranks_named(tuple(failures))}: "
    return ranks + messages.pop()
