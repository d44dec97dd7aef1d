"""ENGINE: what a person's names lead to: modules, optimizers, schedulers, by dotted name.

A search through the namespace, containers and the attributes of plain objects, to a small depth,
nearest first. Libraries, classes, functions, tensors, long lists (data) and the objects of IPython,
which lead back to the namespace, are not entered.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind")
_DEPTH = 4
_LONGEST = 256
_SHELL = ("IPython", "ipykernel", "ipyparallel", "traitlets", "zmq")
_CLOSED = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    torch.Tensor, torch.optim.Optimizer, str, bytes, int, float, complex, bool, range,
    torch.device, torch.dtype,
)  # fmt: skip
_PLAIN = frozenset({str, int, float, bool, bytes, type(None), torch.Tensor, torch.nn.Parameter})
_KEYS = (str, int, float, bool, tuple)
"""Keys that lead somewhere when they are typed; an optimizer's state has tensors for keys."""
_Place = tuple[Any, str, Any]
"""Where an object was found: the place of what holds it, and the text with the key in it; it
becomes a name only where something was found."""


def reachable(
    namespace: Mapping[str, Any], kind: type[Kind], *, names: Iterable[str] | None = None
) -> dict[str, Kind]:
    """Return objects of a class by the shortest dotted name that leads to them.

    What is found is not searched further, so only the outermost of nested modules count.

    Args:
        namespace: the person's variables.
        kind: the class to look for.
        names: where to begin; None: every name without a leading underscore.
    """
    if names is None:
        names = [name for name in namespace if not name.startswith("_")]
    level = [((None, "{}", name), namespace[name]) for name in names if name in namespace]
    found: dict[int, tuple[_Place, Kind]] = {}
    seen: set[int] = set()
    for depth in range(_DEPTH + 1):
        below: list[tuple[_Place, Any]] = []
        for place, value in level:
            if isinstance(value, kind):
                found.setdefault(id(value), (place, value))
            elif depth < _DEPTH and id(value) not in seen and _is_open(value):
                seen.add(id(value))
                text, items = _parts(value)
                below += [((place, text, key), item) for key, item in items]
        level = below
    return {_dotted(place): item for place, item in found.values()}


def outermost(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules that are not part of another one of them."""
    inner = {
        id(child)
        for module in modules.values()
        for child in module.modules()
        if child is not module
    }
    return {name: module for name, module in modules.items() if id(module) not in inner}


def _dotted(place: _Place) -> str:
    owner, text, key = place
    return ("" if owner is None else _dotted(owner)) + text.format(key)


def _is_open(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:  # most of what there is
        return False
    return not isinstance(value, _CLOSED) and kind.__module__.partition(".")[0] not in _SHELL


def _parts(value: Any) -> tuple[str, Iterable[tuple[Any, Any]]]:
    """Return what a value holds by key or number, and the text that leads from it to a key."""
    if isinstance(value, Mapping):
        if len(value) <= _LONGEST:
            return "[{!r}]", [pair for pair in value.items() if isinstance(pair[0], _KEYS)]
    elif isinstance(value, (list, tuple, set, frozenset)):
        if len(value) <= _LONGEST:
            return "[{!r}]", enumerate(list(value))
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            return ".{}", list(attributes.items())
    return "", ()
