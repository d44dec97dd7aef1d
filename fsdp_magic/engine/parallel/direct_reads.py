"""ENGINE: which parts of a module have their parameters read by the module itself.

``F.linear(x, self.out.weight)`` uses a part without calling it, so the part is not gathered unless
it belongs to the same unit. Attention and transformer layers of torch do this, and some heads.
It is read from the compiled code of the module's class: a chain of attributes from a child to a
parameter of what it leads to. Asking a parameter for its dtype or shape is no use of it.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_HARMLESS = frozenset(
    {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_meta"}
)
"""Attributes of a parameter that are the same for its shards."""
_BUILDING = ("__init__", "init", "_init", "reset_parameters", "tie", "_tie", "extra_repr", "_load")
"""Beginnings of names of functions that run before a model is sharded, or around saving."""


def read_directly(owner: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside one that cannot be units of their own: its code reads from them."""
    kind: Any = type(owner)
    for code in _codes_of(kind) if owner._modules else ():
        if not owner._modules.keys().isdisjoint(code.co_names):
            for chain in _chains_in(code):
                yield from _read_through(owner, chain)


def _read_through(owner: nn.Module, chain: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules on the way from one to a parameter that a chain of names leads to."""
    part, passed = owner, []
    for place, name in enumerate(chain):
        if name in part._modules and part._modules[name] is not None:
            part = part._modules[name]  # type: ignore[assignment]
            passed.append(part)
            continue
        is_parameter = part._parameters.get(name) is not None
        asked = chain[place + 1] if place + 1 < len(chain) else ""
        return passed if is_parameter and asked not in _HARMLESS else []
    return []


@functools.lru_cache(maxsize=512)
def _codes_of(kind: Any) -> tuple[CodeType, ...]:
    """Return the code of the methods of a class, of functions inside them too."""
    codes: list[CodeType] = []
    for each in kind.__mro__:
        if each in (nn.Module, object):
            continue
        for name, function in vars(each).items():
            if isinstance(function, FunctionType) and not name.startswith(_BUILDING):
                codes += _with_inner(inspect.unwrap(function).__code__)
    return tuple(codes)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


@functools.lru_cache(maxsize=4096)
def _chains_in(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the chains of two or more attributes that code takes."""
    chains: dict[tuple[str, ...], None] = {}
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            chain.append(str(instruction.argval))
            continue
        if len(chain) > 1:
            chains[tuple(chain)] = None
        chain = []
    return tuple(chains)
