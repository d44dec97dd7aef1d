"""ENGINE: the names a cell finds, and a person's own values of them.

Every cell finds ``rank``, ``world_size`` and others. A person may use such a word for something
of theirs (``rank = 16`` of an adapter): while a cell runs it is hidden, afterwards it is back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MISSING = object()


class Names:
    """Binds our names around cells.

    Args:
        namespace: where the person's variables live.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._told: set[str] = set()
        self._ours: dict[str, Any] = {}
        self._own: dict[str, Any] = {}

    def bind(self, values: Mapping[str, Any]) -> None:
        """Give names that are bound around the running cell new values."""
        for name in values.keys() - self._own.keys():
            self._own[name] = self.namespace.get(name, _MISSING)
        self._ours.update(values)
        self.namespace.update(values)

    @contextmanager
    def bound(self, values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        """Bind names inside, and put the person's own values back afterwards.

        A name that the cell itself binds anew keeps the cell's value: it is the person's.

        Yields:
            The person's names that are hidden for the first time.
        """
        hidden = [name for name in values if name in self.namespace and name not in self._told]
        self._told.update(hidden)
        self._ours, self._own = {}, {}
        self.bind(values)
        try:
            yield tuple(hidden)
        finally:
            for name, value in self._ours.items():
                if self.namespace.get(name, _MISSING) is not value:
                    continue
                if self._own[name] is _MISSING:
                    del self.namespace[name]
                else:
                    self.namespace[name] = self._own[name]

    @contextmanager
    def set_aside(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """Put a person's functions under names that a cell binds back afterwards.

        ``loss = nn.MSELoss()`` would be gone for good; a number or a tensor under such a name is
        what an earlier cell left, and is replaced.

        Yields:
            The names that are set aside for the first time.
        """
        own = {n: v for n in names if callable(v := self.namespace.get(n))}
        first = tuple(name for name in own if name not in self._told)
        self._told.update(first)
        try:
            yield first
        finally:
            self.namespace.update(own)
