"""What a peak is made of: by kind of memory, and by the place in the model; pure.

Places that a model repeats are one: ``transformer.h.0.attn`` and ``transformer.h.1.attn`` are
``transformer.h.*.attn``. What lies deeper than one name below a repeated module counts to that
name. The last module to run that computes by itself, and what is computed outside of modules after
it, are ``lm_head and loss``: the scores of every class, and the loss over them. What the model's
own forward computes before it (``x + layer(x)``) is a place of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import NamedTuple

from fsdp_magic.core.planning.ledger import Entry
from fsdp_magic.core.planning.step_trace import Allocated, Kind, Reached, StepTrace

_REPEATED = re.compile(r"(?<![^.])\d+(?![^.])")
_PLACED: frozenset[Kind] = frozenset({"activation", "temporary"})
"""Kinds of which it says something where they were taken; the rest is of the model as a whole."""
OPTIMIZER = "optimizer"
"""The place of what the optimizer needs for a moment."""
OWN_FORWARD = "the model's own forward"
"""The place of what a model computes between its modules."""


class PeakPart(NamedTuple):
    """A part of a peak: what it is of, where it was taken (empty: all over), and its bytes."""

    kind: Kind
    place: str
    bytes: int


def by_kind(held: Iterable[Entry], micro_batch_size: int) -> dict[Kind, int]:
    """Return the bytes of each kind, the largest first."""
    sizes: dict[Kind, float] = {}
    for entry in held:
        sizes[entry.kind] = sizes.get(entry.kind, 0.0) + entry.size.at(micro_batch_size)
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return {kind: round(size) for kind, size in ordered if round(size)}


def parts_of(
    held: Iterable[Entry], micro_batch_size: int, trace: StepTrace
) -> tuple[PeakPart, ...]:
    """Return what is held by kind and place, the largest first."""
    named, own = _namer(trace), _own_forward(trace)
    sizes: dict[tuple[Kind, str], float] = {}
    for entry in held:
        key = (entry.kind, _place(entry, named, own))
        sizes[key] = sizes.get(key, 0.0) + entry.size.at(micro_batch_size)
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return tuple(PeakPart(kind, place, round(size)) for (kind, place), size in ordered if size >= 1)


def _place(entry: Entry, named: Callable[[str], str], own: Collection[Hashable]) -> str:
    """Return the name of the group of places that an entry is in.

    Args:
        entry: of the ledger.
        named: gives a place the name of its group.
        own: numbers of what the model's own forward took before its last module.
    """
    if entry.kind == "communication":
        return entry.place
    if entry.kind not in _PLACED:
        return ""
    if entry.key[0] == OPTIMIZER:
        return OPTIMIZER
    is_own = not entry.place and entry.key[0] == "traced" and entry.key[-1] in own
    return OWN_FORWARD if is_own else named(entry.place)


def loss_place(trace: StepTrace) -> str:
    """Return the name of what a model computes last: ``lm_head and loss``."""
    head = _head(trace)
    return f"{head} and loss" if head else f"{OWN_FORWARD} and loss"


def is_block(place: str) -> bool:
    """Return whether a place is in a module that the model repeats."""
    return "*" in place.split(".")


def _namer(trace: StepTrace) -> Callable[[str], str]:
    """Return what gives a place the name of its group."""
    last, head = loss_place(trace), _head(trace)
    known: dict[str, str] = {}

    def named(place: str) -> str:
        if place not in known:
            known[place] = last if place in ("", head) else grouped(place)
        return known[place]

    return named


def grouped(place: str) -> str:
    """Return a place with every number as ``*``, cut one name below the first of them."""
    names = _REPEATED.sub("*", place).split(".")
    end = names.index("*") + 2 if "*" in names else len(names)
    return ".".join(names[:end])


def _head(trace: StepTrace) -> str:
    """Return the module that computes last by itself, if the model does not repeat it; or nothing.

    It is the last whose forward took memory before backward, the model itself left aside.
    """
    places = [place for place in _forward_places(trace) if place and not is_block(grouped(place))]
    return places[-1] if places else ""


def _own_forward(trace: StepTrace) -> frozenset[int]:
    """Return the numbers of what is taken outside of modules before the last of them runs."""
    head = _head(trace)
    outside: list[int] = []
    before_head: list[int] = []
    for event in trace.micro_step:
        if isinstance(event, Reached):
            if event.mark == "backward":
                break
            if head and event.mark == "forward" and event.name == head:
                before_head = outside.copy()
        elif isinstance(event, Allocated) and not event.place:
            outside.append(event.id)
    return frozenset(before_head)


def _forward_places(trace: StepTrace) -> Iterator[str]:
    for event in trace.micro_step:
        if isinstance(event, Reached) and event.mark == "backward":
            return
        if isinstance(event, Allocated) and event.kind == "activation":
            yield event.place
