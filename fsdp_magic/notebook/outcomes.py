"""KERNEL: from the ranks' replies to what a person gets: outputs, or the error that tells why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_magic.core.cell_output import CellOutput
from fsdp_magic.core.errors import CellFailedError, OutOfMemoryOnRankError, RanksDivergedError
from fsdp_magic.core.protocol import Failure, Reply
from fsdp_magic.core.units import ranks_text
from fsdp_magic.notebook.output import Output
from fsdp_magic.panels import errors as error_panel
from fsdp_magic.panels import waiting


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
    replies: Mapping[int, Reply], output: Output, timeout: float | None
) -> CellFailedError:
    """Return the exception that tells why a cell failed."""
    failures = {r: reply.failure for r, reply in replies.items() if reply.failure is not None}
    own = {r: f for r, f in failures.items() if f.kind != "released"} or failures
    released = tuple(sorted(set(failures) - set(own)))
    diverged = waiting.diverged(failures)
    text = diverged or _refusal(own, everywhere=len(own) == len(replies))
    lines = text.splitlines()
    if not text:
        text = error_panel.text(own, released=released)
        lines = error_panel.coloured(own, released=released)
    if timeout is not None:
        stopped = f"the cell was stopped after {timeout:g} s (--timeout)"
        text, lines = f"{stopped}\n{text}", [stopped, *lines]
    full = any(failure.kind == "out_of_memory" for failure in own.values())
    kind = OutOfMemoryOnRankError if full else CellFailedError
    kind = RanksDivergedError if diverged else kind
    return kind(text, exceptions=own, outputs=outputs(replies, output), rendered=lines)


def _refusal(failures: Mapping[int, Failure], *, everywhere: bool) -> str:
    """Return one line if we refused the same thing on every rank that failed, else nothing."""
    messages = {failure.message for failure in failures.values()}
    if len(messages) > 1 or any(failure.kind != "usage" for failure in failures.values()):
        return ""
    ranks = "" if everywhere else f"rank {ranks_text(tuple(failures))}: "
    return ranks + messages.pop()
