"""ENGINE: one source on one rank, epoch after epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import order
from fsdp_magic.engine.cut import Cut, Reader
from fsdp_magic.engine.planned import by_samples, by_tokens
from fsdp_magic.engine.position import Cursor, Place
from fsdp_magic.engine.sources import Kind, Ready, Samples, Stream, kind_of
from fsdp_magic.engine.streamed import ReadyReader, StreamReader


class Track:
    """One source on one rank.

    Args:
        source: what the person bound; a function is called once per epoch.
        cut: how it is cut.
        cursor: where to begin; moved by ``commit``.

    Attributes:
        reader: of the present epoch.
        begins_anew: False: it can be read once.
    """

    def __init__(self, source: Any, *, cut: Cut, cursor: Cursor) -> None:
        self._cut = cut
        self._cursor = cursor
        self._function = source if is_function(source) else None
        self._kind = None if self._function else kind_of(source)
        self._after: Place | None = None
        self._notes: list[str] = []
        self.reader, self.begins_anew = self._opened()

    @property
    def epoch(self) -> int:
        """The epoch that the next batches belong to."""
        return self._cursor.place.epoch

    @property
    def place(self) -> Place:
        """Where the next step begins, for another process: without the iterator that is there."""
        place = self._cursor.place
        return Place(epoch=place.epoch, consumed=place.consumed, unit=place.unit)

    @property
    def is_sequential(self) -> bool:
        """Whether a place is only reached by reading everything before it."""
        return isinstance(self.reader, StreamReader | ReadyReader)

    @property
    def is_at_beginning(self) -> bool:
        """Whether nothing of the present epoch was taken."""
        return self._cursor.place.consumed == 0

    @property
    def has_constant_length(self) -> bool:
        """Whether every epoch has as many steps as this one."""
        return self._function is None and self._cut.tokens_per_batch is None

    @property
    def notes(self) -> list[str]:
        """Sentences a person should read, each once."""
        return list(dict.fromkeys([*self._notes, *self.reader.notes]))

    def take(self) -> list[Any] | None:
        """Return the next step's micro-batches; None if the epoch has no whole step more."""
        step = self.reader.take()
        self._after = None if step is None else step.after
        return None if step is None else step.batches

    def commit(self) -> None:
        """Move past the step that was taken last; without this its batches come again."""
        if self._after is not None:
            self._cursor.place, self._after = self._after, None

    def turn(self) -> None:
        """Begin the next epoch."""
        self._notes = self.notes
        if self._function is not None:
            self.reader.close()
        place = self._cursor.place
        self._cursor.place = Place(epoch=place.epoch + 1, unit=place.unit)
        self._after = None
        self.reader, self.begins_anew = self._opened()

    def close(self) -> None:
        """End worker processes; the position stays."""
        self.reader.close()

    def _opened(self) -> tuple[Reader, bool]:
        if self._kind is not None:
            kind = self._kind
            anew = kind.begins_anew if isinstance(kind, Ready) else True
            return _reader(kind, self._cut, self._cursor), anew
        assert self._function is not None
        if self._cursor.place.made is None:
            self._cursor.begin(made=called(self._function, self._cut.seed, self.epoch))
        return _reader(kind_of(self._cursor.place.made), self._cut, self._cursor), True


def is_function(source: Any) -> bool:
    """Return whether a source is to be called for its data."""
    holds = isinstance(source, Iterable) or hasattr(source, "__getitem__")
    return callable(source) and not holds and not isinstance(source, (type, nn.Module))


def called(function: Callable[..., Any], seed: int, epoch: int) -> Any:
    """Return what a person's function makes for an epoch; it draws alike on all ranks.

    Raises:
        FsdpError: if it wants more than the epoch, or returns no data.
    """
    name = getattr(function, "__name__", type(function).__name__)
    wanted = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and (parameter.default is parameter.empty or parameter.name == "epoch")
    ]
    if len(wanted) > 1:
        raise FsdpError(
            f"--data {name} wants {', '.join(wanted)}; a function for data is called with the "
            "epoch, or with nothing"
        )
    with order.drawing_alike(seed, epoch).in_place():
        made = function(epoch) if wanted else function()
    if made is None or is_function(made):
        raise FsdpError(
            f"--data {name} is a function, and it returned {type(made).__name__}; return a data "
            "set, a list, a DataLoader or an iterable of batches"
        )
    return made


def _reader(kind: Kind, cut: Cut, cursor: Cursor) -> Reader:
    """Return the reader of the epoch that a cursor is in."""
    if isinstance(kind, Stream):
        return StreamReader(kind, cut, cursor)
    if isinstance(kind, Ready):
        return ReadyReader(kind, cut, cursor)
    assert isinstance(kind, Samples)
    if cut.tokens_per_batch is None:
        return by_samples(kind, cut, cursor)
    return by_tokens(kind, cut, cursor, most=cut.tokens_per_batch)
