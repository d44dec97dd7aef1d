"""ENGINE: how much memory the names of a cell still hold after it ran out of memory.

What the cell left in its frames is gone by then, but a list that it filled is the person's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_magic.core.units import MIB

_PART_OF_CAPACITY = 16
_MUCH_BYTES = 64 * MIB
"""How much is worth telling where nobody knows how much there is."""
_MOST_VALUES = 100_000
_FILLING = ("append", "extend", "insert", "add", "update", "setdefault", "appendleft")


def names_filled(tree: ast.AST) -> set[str]:
    """Return the names of containers that a cell puts something into."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
                if attribute in _FILLING:
                    names.add(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                names.add(name)
    return names


def much_held(
    namespace: Mapping[str, Any],
    names: Iterable[str],
    *,
    device: torch.device,
    capacity_bytes: int | None,
) -> tuple[tuple[str, int], ...]:
    """Return the names that hold much of a device's memory, with their bytes, the largest first.

    Models and optimizers are no concern of this: what they hold is what they need.
    """
    much = _MUCH_BYTES if capacity_bytes is None else capacity_bytes // _PART_OF_CAPACITY
    found = [(name, _bytes_of(namespace.get(name), device)) for name in sorted(names)]
    return tuple(sorted((f for f in found if f[1] >= much), key=lambda f: -f[1]))


def _bytes_of(value: Any, device: torch.device) -> int:
    """Return what tensors and arrays take in a value or in its containers, each storage once."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    values = [value]
    while values and len(seen) < _MOST_VALUES:
        each = values.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, DTensor):
            each = each.to_local()
        if isinstance(each, torch.Tensor):
            if each.device.type == device.type and each.layout is torch.strided:
                storage = each.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        elif hasattr(type(each), "__array_interface__") and device.type == "cpu":  # numpy's
            sizes[each.__array_interface__["data"][0]] = each.nbytes
        elif isinstance(each, (bytes, bytearray)) and device.type == "cpu":
            sizes[id(each)] = len(each)
        elif isinstance(each, Mapping):
            values += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            values += each
    return sum(sizes.values())
