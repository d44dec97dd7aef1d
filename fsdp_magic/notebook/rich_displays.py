"""KERNEL: what ranks display: figures, tables, HTML, each bundle of several ranks once.

A display that a rank updates, or that follows its ``clear_output``, takes the place of the one
before, so a live plot stays where it is. ``clear_output`` clears nothing else: not the lines, not
what other ranks showed, not our panels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_magic.core.units import ranks_text
from fsdp_magic.notebook.screen import Screen

_LIMIT = 200
"""New displays per cell; beyond, a page hardly scrolls, and the file grows by each of them."""


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


class RichDisplays:
    """The displays of a cell.

    Args:
        screen: where they are shown.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._named: dict[tuple[int, str], _Place] = {}
        self._recent: dict[int, list[_Place]] = {}
        self._cleared: dict[int, list[_Place]] = {}
        self._count = 0

    def show(self, items: Mapping[int, Shown]) -> None:
        """Show what looks the same on some ranks."""
        ranks, item = tuple(sorted(items)), next(iter(items.values()))
        if item.update and not any(self._named_by(rank, own) for rank, own in items.items()):
            return  # what it had that name for is gone, as on any page
        for rank in ranks if item.after_clear else ():
            self._cleared[rank] = self._recent.pop(rank, [])
        place = self._old_place(items)
        if place is not None:
            place.handle.update(dict(item.bundle), metadata=dict(item.metadata), raw=True)
        else:
            place = self._new_place(ranks, item)
        if place is not None:
            self._remember(items, place)

    def _remember(self, items: Mapping[int, Shown], place: _Place) -> None:
        if not next(iter(items.values())).update:
            self._named = {name: p for name, p in self._named.items() if p is not place}
        for rank, own in items.items():
            if own.display_id:
                self._named[rank, own.display_id] = place
            if not own.update:
                self._recent.setdefault(rank, []).append(place)

    def _named_by(self, rank: int, item: Shown) -> _Place | None:
        return self._named.get((rank, item.display_id))

    def finish(self) -> None:
        """Say how many displays were not shown."""
        if self._count > _LIMIT:
            self._screen.write("stdout", f"… {self._count - _LIMIT:,} more displays\n")

    def _old_place(self, items: Mapping[int, Shown]) -> _Place | None:
        """Return the place that all of these ranks, and no other, may show something else in."""
        found: list[_Place | None] = []
        for rank, item in items.items():
            if item.update:
                found.append(self._named_by(rank, item))
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
        name = f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
        self._screen.write("stdout", f"[{name}]\n")
        return _Place(ranks, self._screen.display(item.bundle, item.metadata))
