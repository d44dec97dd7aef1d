"""KERNEL: what ranks display: figures, tables, HTML, each bundle of several ranks once.

A display that a rank updates, or that follows its ``clear_output``, takes the place of the one
before, so a live plot stays where it is; it is drawn at most four times a second. An update may
come in a later cell. ``clear_output`` clears nothing else: not the lines, not what other ranks
showed, not our panels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_magic.core.units import ranks_named
from fsdp_magic.notebook.screen import Screen

_LIMIT = 200
"""New displays per cell; beyond, a page hardly scrolls, and the file grows by each of them."""
_FRAME_SECONDS = 0.25
_NAMES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Something to be shown.

    Attributes:
        bundle, metadata: by MIME type.
        display_id: the rank's own name for it; empty: none.
        update: whether it takes the place of what has that name.
        after_clear: whether the rank cleared its output just before.
    """

    bundle: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    display_id: str = ""
    update: bool = False
    after_clear: bool = False

    def is_like(self, other: Shown) -> bool:
        """Return whether both look the same; names differ by rank."""
        return (self.bundle, self.metadata, self.update, self.after_clear) == (
            other.bundle,
            other.metadata,
            other.update,
            other.after_clear,
        )


@dataclass(slots=True, eq=False)
class _Place:
    ranks: tuple[int, ...]
    handle: Any
    newest: Shown | None = None
    """What is still to be drawn."""
    drawn_at: float = float("-inf")

    def draw(self) -> None:
        """Draw what is still to be drawn."""
        item, self.newest = self.newest, None
        if item is not None:
            self.handle.update(dict(item.bundle), metadata=dict(item.metadata), raw=True)


class DisplayNames:
    """Where displays that have a name are, over the cells of a session; the oldest go first."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], _Place] = {}

    def place(self, rank: int, name: str) -> _Place | None:
        """Return where a rank's display of that name is; None: it is gone."""
        return self._places.get((rank, name))

    def put(self, rank: int, name: str, place: _Place) -> None:
        """Remember where a rank's display of that name is."""
        self._places.pop((rank, name), None)
        self._places[rank, name] = place
        if len(self._places) > _NAMES:
            del self._places[next(iter(self._places))]

    def forget(self, place: _Place) -> None:
        """Forget the names of a place where something else is shown."""
        for key in [key for key, other in self._places.items() if other is place]:
            del self._places[key]


class RichDisplays:
    """The displays of a cell.

    Args:
        screen: where they are shown.
        names: of displays, those of earlier cells too.
    """

    def __init__(self, screen: Screen, names: DisplayNames) -> None:
        self._screen = screen
        self._names = names
        self._changed: dict[int, _Place] = {}
        self._recent: dict[int, list[_Place]] = {}
        self._cleared: dict[int, list[_Place]] = {}
        self._count = 0

    def show(self, items: Mapping[int, Shown]) -> None:
        """Show what looks the same on some ranks."""
        if not next(iter(items.values())).update:
            self._show(items)
            return
        # in each place that they have, which may be one for all or several
        by_place: dict[_Place, dict[int, Shown]] = {}
        for rank, own in items.items():
            place = self._names.place(rank, own.display_id)
            if place is not None:  # else what it had that name for is gone, as on any page
                by_place.setdefault(place, {})[rank] = own
        for alike in by_place.values():
            self._show(alike)

    def _show(self, items: Mapping[int, Shown]) -> None:
        ranks, item = tuple(sorted(items)), next(iter(items.values()))
        for rank in ranks if item.after_clear else ():
            self._cleared[rank] = self._recent.pop(rank, [])
        place = self._old_place(items)
        if place is not None:
            place.newest = item
            self._changed[id(place)] = place
        else:
            place = self._new_place(ranks, item)
        if place is not None:
            self._remember(items, place)

    def tick(self, now: float) -> None:
        """Draw the newest update of each place that was not drawn for a quarter of a second."""
        for key, place in list(self._changed.items()):
            if now - place.drawn_at >= _FRAME_SECONDS:
                place.drawn_at = now
                place.draw()
                del self._changed[key]

    def _remember(self, items: Mapping[int, Shown], place: _Place) -> None:
        if not next(iter(items.values())).update:
            self._names.forget(place)
        for rank, own in items.items():
            if own.display_id:
                self._names.put(rank, own.display_id, place)
            if not own.update:
                self._recent.setdefault(rank, []).append(place)

    def finish(self) -> None:
        """Draw what is still to be drawn, and say how many displays were not shown."""
        for place in self._changed.values():
            place.draw()
        self._changed.clear()
        if self._count > _LIMIT:
            self._screen.write("stdout", f"… {self._count - _LIMIT:,} more displays\n")

    def _old_place(self, items: Mapping[int, Shown]) -> _Place | None:
        """Return the place that all of these ranks, and no other, may show something else in."""
        found: list[_Place | None] = []
        for rank, item in items.items():
            if item.update:
                found.append(self._names.place(rank, item.display_id))
            else:
                free = self._cleared.get(rank, [])
                found.append(free.pop(0) if free else None)
        place = found[0]
        if place is None or any(other is not place for other in found):
            return None
        return place if place.ranks == tuple(sorted(items)) and place.handle is not None else None

    def _new_place(self, ranks: tuple[int, ...], item: Shown) -> _Place | None:
        self._count += 1
        if self._count > _LIMIT:
            return None
        name = ranks_named(ranks)
        self._screen.write("stdout", f"[{name}]\n")
        return _Place(ranks, self._screen.display(item.bundle, item.metadata))
