"""ENGINE: a place in an iterator that can be gone back to.

A link stands before an item. It reads the item when first asked, and holds it and the link after
it. So whoever keeps a link can read on from there again, and what nobody keeps a link to is
freed: no list of what may come again, and nothing to release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fsdp_magic.engine.randomness import TrainingRandomness


@dataclass(slots=True, kw_only=True)
class _Supply:
    """The iterator that the links of one chain read, and whether it still can be read."""

    items: Iterator[Any]
    randomness: TrainingRandomness | None
    on_close: Callable[[], None] | None
    broken: bool = False


class Link:
    """A place in an iterator.

    Args:
        supply: shared by all links of a chain.
    """

    __slots__ = ("_following", "_supply")

    def __init__(self, supply: _Supply) -> None:
        self._supply = supply
        self._following: tuple[Any, Link] | None = None

    @property
    def broken(self) -> bool:
        """Whether the iterator raised or was closed, so that what it still had is lost."""
        return self._supply.broken

    @property
    def repeats(self) -> bool:
        """Whether an iterator begun anew yields the same, or must be begun anew in any case.

        One that draws from a state of its own yields the same; one with workers ends with a run.
        """
        return self._supply.randomness is not None or self._supply.on_close is not None

    def take(self, count: int) -> tuple[list[Any], Link]:
        """Return the next items, fewer at the end, and the place after them."""
        link: Link = self
        items: list[Any] = []
        with self._drawing():
            while len(items) < count and (following := link._follow()) is not None:
                item, link = following
                items.append(item)
        return items, link

    def skip(self, count: int) -> Link:
        """Return the place after the next items, which are read and dropped."""
        link = self
        with self._drawing():
            for _ in range(count):
                following = link._follow()
                if following is None:
                    break
                link = following[1]
        return link

    def close(self) -> None:
        """End the iterator if it has to be ended, as one with worker processes must."""
        if self._supply.on_close is not None:
            self._supply.broken = True
            self._supply.on_close()

    def _drawing(self) -> AbstractContextManager[None]:
        randomness = self._supply.randomness
        return nullcontext() if randomness is None else randomness.in_place()

    def _follow(self) -> tuple[Any, Link] | None:
        if self._following is None:
            try:
                item = next(self._supply.items)
            except StopIteration:
                return None
            except BaseException:
                self._supply.broken = True  # a generator that raised has nothing more
                raise
            self._following = item, Link(self._supply)
        return self._following


def chain(
    items: Iterator[Any],
    *,
    randomness: TrainingRandomness | None = None,
    on_close: Callable[[], None] | None = None,
) -> Link:
    """Return the place before the first item of an iterator.

    Args:
        items: read by nobody else from here on.
        randomness: what it draws from; None: from where everything else draws.
        on_close: ends it; None: it needs no end, and may be read in a later run.
    """
    return Link(_Supply(items=items, randomness=randomness, on_close=on_close))
