"""ENGINE: what a person's names lead to: modules, optimizers, schedulers, by dotted name.

A search through the namespace, containers and the attributes of plain objects, to a small depth.
Libraries, classes, functions, tensors and long lists (data) are not entered.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind")
_DEPTH = 4
_LONGEST = 256
_SHELL = ("IPython", "ipykernel", "ipyparallel")
_CLOSED = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    torch.Tensor, str, bytes, int, float, complex, bool, range, torch.device, torch.dtype,
)  # fmt: skip


def reachable(
    namespace: Mapping[str, Any], kind: type[Kind], *, names: Iterable[str] | None = None
) -> dict[str, Kind]:
    """Return objects of a class by the first dotted name that leads to them.

    What is found is not searched further, so only the outermost of nested modules count.

    Args:
        namespace: the person's variables.
        kind: the class to look for.
        names: where to begin; None: every name without a leading underscore.
    """
    found: dict[int, tuple[str, Kind]] = {}
    seen: set[int] = set()
    if names is None:
        names = [name for name in namespace if not name.startswith("_")]
    for name in names:
        if name in namespace:
            for dotted, item in _search(namespace[name], name, kind, _DEPTH, seen):
                found.setdefault(id(item), (dotted, item))
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


def _search(
    value: Any, name: str, kind: type[Kind], depth: int, seen: set[int]
) -> Iterator[tuple[str, Kind]]:
    if isinstance(value, kind):
        yield name, value
        return
    if depth == 0 or isinstance(value, _CLOSED) or id(value) in seen or _is_the_shells(value):
        return
    seen.add(id(value))
    for part, item in _parts(value):
        yield from _search(item, f"{name}{part}", kind, depth - 1, seen)


def _is_the_shells(value: Any) -> bool:
    """Return whether a value is IPython's own, such as ``exit``, which leads back to every name."""
    return type(value).__module__.partition(".")[0] in _SHELL


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value holds, with the text that leads there."""
    if isinstance(value, Mapping):
        if len(value) <= _LONGEST:
            yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        if len(value) <= _LONGEST:
            yield from ((f"[{index}]", item) for index, item in enumerate(list(value)))
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f".{key}", item) for key, item in list(attributes.items()))
