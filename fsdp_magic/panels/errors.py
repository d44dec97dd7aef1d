"""A cell that failed: whose traceback, which ranks share it, who was released; pure.

It is text, because that is what a notebook keeps of an error: it stands in the saved file, and it
stops Run All. Ranks that failed at the same place stand together, with their messages; of many
different failures the first few are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_magic.core.reply import Failure, FailureKind, OutOfMemory
from fsdp_magic.core.units import bytes_text, ranks_named
from fsdp_magic.panels.parts import one_line, plain

WHAT_HAPPENED: dict[FailureKind, str] = {
    "raised": "raised",
    "interrupted": "interrupted",
    "released": "released, because a peer failed",
    "out_of_memory": "out of memory",
    "usage": "refused the cell before it ran",
    "diverged": "did something else than the others",
}
_MOST_PLACES, _MOST_MESSAGES = 4, 8
_MUCH_MORE = 1.1
"""Used over allocated from which both are told."""
_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Ranks that failed at the same place, in the same way.

    Attributes:
        failure: of the first of them.
        messages: of each rank.
    """

    failure: Failure
    messages: dict[int, str]

    @property
    def heading(self) -> str:
        """Which ranks, and what happened there."""
        memory = self.failure.memory
        if memory is not None:
            return f"{ranks_named(tuple(self.messages))} {one_line(_full(memory))}"
        words = WHAT_HAPPENED[self.failure.kind]
        if self.failure.kind == "raised":
            words += f" {one_line(self.failure.exception_type)}"
        return f"{ranks_named(tuple(self.messages))} {words}"

    @property
    def lines(self) -> list[str]:
        """Traceback, what was raised, and notes; of a full device the heading says most."""
        notes = [plain(note) for note in self.failure.notes]
        memory = self.failure.memory
        if memory is not None:
            own = memory.asked_bytes is None and any(self.messages.values())  # the person's words
            return [*(self._raised() if own else []), *notes]
        traceback = plain(self.failure.traceback).strip("\n")
        return [*([traceback] if traceback else []), *self._raised(), *notes]

    def _raised(self) -> list[str]:
        """Return the line that ends the traceback; where messages differ, one for each."""
        ranks_of: dict[str, list[int]] = {}
        for rank, message in self.messages.items():
            ranks_of.setdefault(plain(message).rstrip(), []).append(rank)
        name = plain(self.failure.exception_type)
        if len(ranks_of) == 1:
            (message,) = ranks_of
            return [f"{name}: {message}" if message else name]
        lines = [f"{ranks_named(tuple(on))}: {name}: {message}" for message, on in ranks_of.items()]
        rest = len(lines) - _MOST_MESSAGES
        more = [f"… {rest} more messages; error.exceptions holds them by rank"] if rest > 0 else []
        return [*lines[:_MOST_MESSAGES], *more]


def text(exceptions: Mapping[int, Failure], *, released: tuple[int, ...] = ()) -> str:
    """Return each place of failure once, with its ranks.

    Args:
        exceptions: the failure of each rank that failed by itself.
        released: ranks stopped because of them.
    """
    return "\n".join(_lines(exceptions, released, heading="{}"))


def coloured(exceptions: Mapping[int, Failure], *, released: tuple[int, ...] = ()) -> list[str]:
    """Return the same as the lines that IPython shows: headings stand out; see ``text``."""
    return _lines(exceptions, released, heading=f"{_BOLD}{{}}{_NORMAL}")


def _lines(
    exceptions: Mapping[int, Failure], released: tuple[int, ...], *, heading: str
) -> list[str]:
    places = _places(exceptions)
    lines: list[str] = []
    for place in places[:_MOST_PLACES]:
        lines += [*([""] if lines else []), heading.format(place.heading), *place.lines]
    if rest := places[_MOST_PLACES:]:
        ranks = tuple(sorted(rank for place in rest for rank in place.messages))
        lines += [
            "",
            f"{ranks_named(ranks)} failed in other ways; error.exceptions holds them by rank",
        ]
    if released:
        lines += [*([""] if len(places) > 1 else []), f"{ranks_named(released)} {_RELEASED}"]
    return lines


_RELEASED = WHAT_HAPPENED["released"]


def _full(memory: OutOfMemory) -> str:
    """Return what a person reads of a full device: where, the numbers, and what to try."""
    where = f" {memory.where}" if memory.where else ""
    asked = "more was" if memory.asked_bytes is None else f"{bytes_text(memory.asked_bytes)} were"
    allocated = f"{bytes_text(memory.allocated_bytes)} of {bytes_text(memory.capacity_bytes)}"
    most = min(memory.used_bytes, memory.capacity_bytes or memory.used_bytes)
    used = f", {bytes_text(most)} used" if most > _MUCH_MORE * memory.allocated_bytes else ""
    advice = f"; {memory.advice}" if memory.advice else ""
    held = "".join(
        f"; `{name}` still holds {bytes_text(size)}: del {name}" for name, size in memory.held
    )
    told = f"{asked} asked for, {allocated} allocated{used}{held}{advice}"
    return f"ran out of memory{where}: {told}"


def _places(exceptions: Mapping[int, Failure]) -> Sequence[_Place]:
    """Return failures at the same place together, in the order of their first ranks."""
    places: dict[Failure, _Place] = {}
    for rank in sorted(exceptions):
        failure = exceptions[rank]
        place = places.setdefault(_without_numbers(failure), _Place(failure=failure, messages={}))
        place.messages[rank] = failure.message
    return list(places.values())


def _without_numbers(failure: Failure) -> Failure:
    """Return a failure without what differs between ranks that failed in the same way."""
    memory = failure.memory
    if memory is None:
        return replace(failure, message="")
    alike = replace(memory, asked_bytes=None, allocated_bytes=0, used_bytes=0, held=())
    return replace(failure, message="", memory=alike)
