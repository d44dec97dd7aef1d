"""ENGINE: what a person's names lead to: modules, optimizers, schedulers, by dotted name.

A search through the namespace, containers and the attributes of plain objects, to a small depth,
nearest first. Libraries, classes, functions, tensors, long lists (data) and the objects of IPython,
which lead back to the namespace, are not entered.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
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
_KEYS = (str, int, float, bool, tuple)
"""Keys that lead somewhere when they are typed; an optimizer's state has tensors for keys."""


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
    level = [(name, namespace[name]) for name in names if name in namespace]
    found: dict[int, tuple[str, Kind]] = {}
    seen: set[int] = set()
    for _ in range(_DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for dotted, value in level:
            if isinstance(value, kind):
                found.setdefault(id(value), (dotted, value))
            elif _is_open(value) and id(value) not in seen:
                seen.add(id(value))
                below += ((f"{dotted}{part}", item) for part, item in _parts(value))
        level = below
    return {dotted: item for dotted, item in found.values()}


def outermost(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules that are not part of another one of them."""
    inner = {
        id(child)
        for module in modules.values()
        for child in module.modules()
        if child is not module
    }
    return {name: module for name, module in modules.items() if id(module) not in inner}


def _is_open(value: Any) -> bool:
    return not isinstance(value, _CLOSED) and type(value).__module__.split(".")[0] not in _SHELL


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value holds, with the text that leads there."""
    if isinstance(value, Mapping):
        if len(value) <= _LONGEST:
            items = [(key, item) for key, item in value.items() if isinstance(key, _KEYS)]
            yield from ((f"[{key!r}]", item) for key, item in items)
    elif isinstance(value, (list, tuple, set, frozenset)):
        if len(value) <= _LONGEST:
            yield from ((f"[{index}]", item) for index, item in enumerate(list(value)))
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f".{key}", item) for key, item in list(attributes.items()))
