"""Traces to and from plain lists, for files that nobody can put code into; pure.

Each record becomes a list: its class's name and its fields in order. Only classes named here are
ever made of one. Whoever reads must be the same version as who wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsdp_magic.core.planning import step_trace
from fsdp_magic.core.planning.requests import FileRead, TraceReport, TraceVariant

_CLASSES: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(step_trace.Size, step_trace.Allocated, step_trace.Freed, step_trace.Reached),
        *(step_trace.TracedParameter, step_trace.TracedModule, step_trace.StepTrace),
        *(step_trace.OptimizerAllocated, step_trace.OptimizerTrace),
        *(TraceVariant, TraceReport, FileRead),
    )
}
_TUPLE, _MAPPING = "()", "{}"
_PLAIN = (str, int, float, bool, type(None))


def fields_of(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a record's fields."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    names: tuple[str, ...] = kind._fields
    return names


def encoded(value: Any) -> Any:
    """Return a record as lists of text, numbers and None.

    Raises:
        TypeError: if something in it is of a class that is not known.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return [_TUPLE, *map(encoded, value)]
    if isinstance(value, Mapping):
        return [_MAPPING, *([encoded(key), encoded(item)] for key, item in value.items())]
    if _CLASSES.get(kind.__name__) is not kind:
        raise TypeError(f"{kind.__name__} cannot be kept")
    return [kind.__name__, *(encoded(getattr(value, name)) for name in fields_of(kind))]


def decoded(value: Any) -> Any:
    """Return the record that lists stand for.

    Raises:
        ValueError: if they stand for none.
    """
    if not isinstance(value, list):
        return value
    tag, *parts = value
    if tag == _TUPLE:
        return tuple(map(decoded, parts))
    if tag == _MAPPING:
        return {decoded(key): decoded(item) for key, item in parts}
    make = _MAKERS.get(tag)
    if make is None:
        raise ValueError(f"{tag!r} is no record of a trace")
    return make(map(decoded, parts))


def _maker(kind: type[Any]) -> Callable[..., Any]:
    names = fields_of(kind)
    if not dataclasses.is_dataclass(kind):
        exactly: Callable[..., Any] = kind._make
        return exactly

    def make(values: Iterable[Any]) -> Any:
        return kind(**dict(zip(names, values, strict=True)))

    return make


_MAKERS = {name: _maker(kind) for name, kind in _CLASSES.items()}
