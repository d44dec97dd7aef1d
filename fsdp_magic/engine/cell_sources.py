"""ENGINE: the source of cells, kept for tracebacks and ``inspect`` as long as it can be needed.

``linecache`` holds a cell under its file name. The entry goes when the last function or class
that the cell made is gone: a thousand cells that only print leave nothing behind.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

PREFIX = "<%%"
_FILE_OF_CLASS: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_getfile = inspect.getfile


class CellSource:
    """The source of one cell.

    Args:
        source: Python.
        name: its file name in tracebacks.
    """

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        # no time stamp: linecache never looks for the file
        self._entry = (len(source), None, source.splitlines(keepends=True), name)
        self._needed_by: dict[int, weakref.ref[Any]] = {}
        linecache.cache[name] = self._entry

    def needed_by(self, code: CodeType) -> None:
        """Keep the source while a piece of its code, or a function in it, is there."""
        for part in _code_within(code):
            self._keep_for(part)

    def note_classes(self, namespace: Mapping[str, Any]) -> None:
        """Remember which classes of a namespace the cell made; they say only their module."""
        for value in list(namespace.values()):
            made_here = isinstance(value, type) and value.__module__ == "__main__"
            if made_here and value not in _FILE_OF_CLASS and self._defines(value):
                _FILE_OF_CLASS[value] = self.name
                self._keep_for(value)

    def _defines(self, made: type) -> bool:
        words = f"class {made.__name__}"
        return any(line.lstrip().startswith(words) for line in self._entry[2])

    def _keep_for(self, thing: Any) -> None:
        reference = weakref.ref(thing, self._gone)
        self._needed_by[id(reference)] = reference

    def _gone(self, reference: weakref.ref[Any]) -> None:
        self._needed_by.pop(id(reference), None)
        if not self._needed_by and linecache.cache.get(self.name) is self._entry:
            del linecache.cache[self.name]


def install() -> None:
    """Let ``inspect.getsource`` find classes of cells.

    Python looks a class up in its module's file, and the module of cells has none.
    """
    inspect.getfile = _file_of  # type: ignore[assignment]


def _file_of(thing: Any) -> str:
    if isinstance(thing, type) and not hasattr(sys.modules.get(thing.__module__), "__file__"):
        name = _FILE_OF_CLASS.get(thing) or _file_of_methods(thing)
        if name is not None:
            return name
    return _getfile(thing)


def _file_of_methods(made: type) -> str | None:
    for value in vars(made).values():
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        if code is not None and code.co_filename.startswith(PREFIX):
            return str(code.co_filename)
    return None


def _code_within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_within(constant)
