"""ENGINE: where the next step begins in each of the data that runs have read."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

from fsdp_magic.engine.chain import Link

_REMEMBERED = 16
"""Data whose places are kept. A place may hold a few batches, and one read-once iterator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in one source.

    Attributes:
        epoch: full passes done.
        consumed: what was taken of this epoch by all ranks, in ``unit``.
        unit: samples, batches, or batches of so many tokens: places in one mean nothing in
            another.
        link: the place in the iterator that is being read; None: begin it.
        made: what the person's function returned for this epoch; None: not called, or no function.
    """

    epoch: int = 0
    consumed: int = 0
    unit: str = "samples"
    link: Link | None = field(default=None, repr=False)
    made: Any = field(default=None, repr=False, compare=False)


class Cursor:
    """The place in one source, as it moves.

    Args:
        source: what the person bound.
        position: told when an iterator is begun.
    """

    def __init__(self, source: Any, position: Position) -> None:
        self._identity = _identity(source)
        self._position = position
        self.place = Place()

    def is_of(self, source: Any) -> bool:
        """Return whether this is the place in that very object."""
        return _is(self._identity, source)

    @property
    def is_left(self) -> bool:
        """Whether the source is gone for everybody else."""
        return _is_only_ours(self._identity)

    def begin(self, *, link: Link | None = None, made: Any = None) -> None:
        """Say what this epoch is read from; marks of this place then lead there too."""
        before = self.place
        self.place = replace(
            before, link=link or before.link, made=before.made if made is None else made
        )
        self._position.begun(self, before)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Mark:
    """Places to go back to; opaque. While it lives, what is read after it is kept.

    Attributes:
        places: by cursor.
        is_lean: whether nothing is kept of what comes again alike when it is begun anew.
    """

    places: dict[Cursor, Place]
    is_lean: bool = False


class Position:
    """Where the next step begins in the data.

    Every source has a place of its own, so a run may change to other data and come back.
    """

    def __init__(self) -> None:
        self._cursors: list[Cursor] = []
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._expected: dict[str, Place] = {}

    def expect(self, places: Mapping[str, Place]) -> None:
        """Begin at places of another engine when a run names that data; other data from its start.

        Args:
            places: by what ``--data`` named.
        """
        for cursor in self._cursors:
            cursor.place = Place()
        self._expected = dict(places)

    def named(self, name: str, source: Any) -> None:
        """Go to the place that is expected of a source, where a run names it first."""
        place = self._expected.pop(name, None)
        if place is not None:
            self.cursor(source).place = place

    def cursor(self, source: Any) -> Cursor:
        """Return the place in a source; its beginning if it was never read."""
        self._cursors = [cursor for cursor in self._cursors if not cursor.is_left]
        cursor = next((c for c in self._cursors if c.is_of(source)), None)
        if cursor is None:
            cursor = Cursor(source, self)
        else:
            self._cursors.remove(cursor)
        self._cursors = [*self._cursors[1 - _REMEMBERED :], cursor]
        return cursor

    def mark(self) -> Mark:
        """Return where everything is now, to go ``back`` to as often as is wanted."""
        mark = Mark(places={cursor: cursor.place for cursor in self._cursors})
        self._marks.add(mark)
        return mark

    def lean_mark(self) -> Mark:
        """Return where everything is now, to be kept for long.

        What comes again alike when it is begun anew is then read again up to the place; only of
        other iterators is kept what is read after it.
        """
        places = {
            cursor: replace(cursor.place, link=None) if _repeats(cursor.place) else cursor.place
            for cursor in self._cursors
        }
        mark = Mark(places=places, is_lean=True)
        self._marks.add(mark)
        return mark

    def made(self, mark: Mark) -> bool:
        """Return whether a mark is one of this position."""
        return mark in self._marks

    def back(self, mark: Mark) -> None:
        """Put the position back to a mark exactly, also in iterators that cannot be rewound.

        Between runs only: a run that is under way does not look again.
        """
        for cursor in self._cursors:
            cursor.place = mark.places.get(cursor, Place())

    def begun(self, cursor: Cursor, before: Place) -> None:
        """Let marks that hold a place without an iterator lead to the iterator begun there."""
        for mark in self._marks:
            if mark.is_lean and _repeats(cursor.place):
                continue
            if mark.places.get(cursor, Place()) == before:
                mark.places[cursor] = cursor.place


def _repeats(place: Place) -> bool:
    return place.link is not None and place.link.repeats


@dataclass(frozen=True, slots=True)
class _Held:
    """A source that cannot be held weakly (a list, say), so that its id is not given anew."""

    source: Any
    type: type


def _identity(source: Any) -> Any:
    """Return what tells an object from others, without keeping it alive where that is possible."""
    if isinstance(source, MethodType):  # made anew each time it is named
        return _identity(source.__self__), source.__func__
    try:
        return weakref.ref(source)
    except TypeError:
        return _Held(source, type(source))


def _is(identity: Any, source: Any) -> bool:
    if isinstance(identity, weakref.ref):
        return identity() is source
    if isinstance(identity, _Held):
        return identity.source is source
    itself, function = identity
    return (
        isinstance(source, MethodType)
        and source.__func__ is function
        and _is(itself, source.__self__)
    )


def _is_only_ours(identity: Any) -> bool:
    """Return whether nobody but a place holds its source any more."""
    # the field of ``_Held`` and the argument of getrefcount
    return isinstance(identity, _Held) and sys.getrefcount(identity.source) <= 2
