"""A cell that failed: whose traceback, which ranks share it, who was released; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_magic.core.protocol import Failure, FailureKind
from fsdp_magic.core.units import ranks_text
from fsdp_magic.panels.parts import RED, SMALL, card, escape, icon, one_line, plain

WHAT_HAPPENED: dict[FailureKind, str] = {
    "raised": "raised",
    "interrupted": "interrupted",
    "released": "released, because a peer failed",
    "out_of_memory": "out of memory",
    "usage": "refused the cell before it ran",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Ranks that failed in the same way."""

    ranks: tuple[int, ...]
    failure: Failure

    @property
    def heading(self) -> str:
        """Which ranks, and what happened there."""
        words = WHAT_HAPPENED[self.failure.kind]
        if self.failure.kind == "raised":
            words += f" {one_line(self.failure.exception_type)}"
        return f"{_ranks(self.ranks)} {words}"

    @property
    def last_line(self) -> str:
        """The line that ends a traceback."""
        name, message = plain(self.failure.exception_type), plain(self.failure.message).rstrip()
        return f"{name}: {message}" if message else name


def html(exceptions: Mapping[int, Failure], *, released: tuple[int, ...] = ()) -> str:
    """Return each distinct failure once, with its ranks.

    Args:
        exceptions: the failure of each rank that failed by itself.
        released: ranks stopped because of them.
    """
    blocks = "".join(_block(group) for group in _groups(exceptions))
    ending = f'<div style="{SMALL}">{escape(_released(released))}</div>' if released else ""
    return card(blocks + ending, label="Failed cell")


def text(exceptions: Mapping[int, Failure], *, released: tuple[int, ...] = ()) -> str:
    """Return the same as text; see ``html``."""
    lines = []
    for group in _groups(exceptions):
        traceback = plain(group.failure.traceback).strip("\n")
        notes = [plain(note) for note in group.failure.notes]
        lines += [group.heading, *([traceback] if traceback else []), group.last_line, *notes, ""]
    if released:
        lines.append(_released(released))
    return "\n".join(lines).rstrip("\n")


def _groups(exceptions: Mapping[int, Failure]) -> list[_Group]:
    """Return equal failures together, in the order of their first ranks."""
    ranks_of: dict[Failure, list[int]] = {}
    for rank in sorted(exceptions):
        ranks_of.setdefault(exceptions[rank], []).append(rank)
    return [_Group(ranks=tuple(ranks), failure=failure) for failure, ranks in ranks_of.items()]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def _released(ranks: tuple[int, ...]) -> str:
    return f"{_ranks(ranks)} {WHAT_HAPPENED['released']}"


def _block(group: _Group) -> str:
    traceback = escape(group.failure.traceback).strip("\n")
    frames = (
        '<pre style="margin:4px 0;padding:0;border:0;background:transparent;color:inherit;'
        f'font-size:12px;white-space:pre;overflow-x:auto">{traceback}</pre>'
        if traceback
        else ""
    )
    notes = "".join(f"<div>{escape(note)}</div>" for note in group.failure.notes)
    return (
        f'<div style="margin-bottom:8px"><div>{icon("✕", RED)} <b>{escape(group.heading)}</b></div>'
        f'{frames}<div style="white-space:pre-wrap;overflow-wrap:anywhere">'
        f"<b>{escape(group.failure.exception_type)}</b>{_message(group)}</div>"
        f'<div style="{SMALL}">{notes}</div></div>'
    )


def _message(group: _Group) -> str:
    message = escape(group.failure.message).rstrip()
    return f": {message}" if message else ""
