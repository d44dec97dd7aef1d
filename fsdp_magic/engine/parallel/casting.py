"""ENGINE: low-precision copies in the places of whole parameters while a unit computes.

What FSDP2's mixed precision does by gathering, for strategies whose ranks hold parameters whole.
Each parameter is cast once for a forward of its unit, however many places it stands in; the cast
is differentiable, so its gradient arrives in the parameter's own dtype. Places are put back when
the call ends, also when it raises.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.forwards import Forward, Order, is_computed_again, lay_around
from fsdp_magic.engine.parallel.methods import direct_methods, given_tensors, replace
from fsdp_magic.engine.parallel.precision import OUTPUT_DTYPE, castable

Place = tuple[nn.Module, str]


def compute_in(root: nn.Module, units: Iterable[tuple[nn.Module, ...]], dtype: torch.dtype) -> None:
    """Let a model with whole parameters compute in a dtype, in place; its parameters stay.

    Args:
        root: the model.
        units: modules in it whose parameters are cast together; the rest is the root's. What is
            computed again in backward is a unit too, so that it casts the same both times.
        dtype: bf16 or fp16.
    """
    units = [unit for unit in units if root not in unit]
    own = {id(module) for unit in units for module in unit} | {id(root)}
    again = [(m,) for m in root.modules() if is_computed_again(m) and id(m) not in own]
    heads = [*units, *again, (root,)]
    head_ids = {id(module) for unit in heads for module in unit}
    for unit in heads:
        members = list(_members(unit, head_ids))
        casts = _Casts(members, dtype, returns=OUTPUT_DTYPE if unit == (root,) else None)
        for module in members:
            if casts.places_in(module):
                casts.around(module)


def _members(modules: Iterable[nn.Module], heads: set[int]) -> Iterator[nn.Module]:
    """Yield modules and what is in them, but not other units."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield module
        for child in module.children():
            if id(child) not in heads:
                yield from walk(child)

    for module in modules:
        yield from walk(module)


class _Casts:
    """The casts of one unit.

    Args:
        members: its modules.
        dtype: what they compute in.
        returns: what a call from outside of the unit returns; None: as it comes.
    """

    def __init__(
        self, members: list[nn.Module], dtype: torch.dtype, *, returns: torch.dtype | None
    ) -> None:
        self._members = {id(module) for module in members}
        self._dtype = dtype
        self._returns = returns
        self._copies: dict[int, torch.Tensor] = {}
        self._in_place: set[tuple[int, str]] = set()
        self._depth = 0

    def places_in(self, module: nn.Module) -> list[Place]:
        """Return where parameters of the unit stand in a module and what is in it."""
        own = [part for part in module.modules() if id(part) in self._members]
        return [(part, name) for part in own for name, _ in castable(part)]

    def around(self, module: nn.Module) -> None:
        """Have the copies in place while a module of the unit is called."""
        places = [(weakref.ref(part), name) for part, name in self.places_in(module)]
        # it must not hold the module, which holds it
        calling = functools.partial(self._calling, id(module), places)
        lay_around(module, Order.CAST, calling)
        for name in direct_methods(module):
            method = calling(getattr(type(module), name))
            replace(module, name, given_tensors(method, module, name))

    def _calling(
        self, own: int, places: Sequence[tuple[weakref.ref[nn.Module], str]], function: Forward
    ) -> Forward:
        """Return a function of a module's class that has the copies in place."""

        @functools.wraps(function)
        def calling(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # asked first: the compiler would look out for the identity that it sees
            if torch.compiler.is_compiling() or id(self_) != own:  # a part, or a deep copy
                return function(self_, *args, **kwargs)
            is_outermost = not self._depth
            if is_outermost:
                args = torch_private.cast_floating(args, self._dtype)
                kwargs = torch_private.cast_floating(kwargs, self._dtype)
            with self._copies_in(((m, n) for ref, n in places if (m := ref()) is not None)):
                output = function(self_, *args, **kwargs)
            if is_outermost and self._returns is not None:
                return torch_private.cast_floating(output, self._returns)
            return output

        return calling

    @contextmanager
    def _copies_in(self, places: Iterable[Place]) -> Iterator[None]:
        """Have copies in places inside, in those that have none yet."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._depth += 1
        try:
            for module, name in places:
                parameter = module._parameters.get(name)
                if parameter is None or (id(module), name) in self._in_place:
                    continue
                replaced.append((module, name, parameter))
                self._in_place.add((id(module), name))
                _put(module, name, self._copy_of(parameter))
            yield
        finally:
            for module, name, parameter in reversed(replaced):
                _put(module, name, parameter)
                self._in_place.discard((id(module), name))
            self._depth -= 1
            if not self._depth:
                self._copies.clear()

    def _copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) not in self._copies:
            self._copies[id(parameter)] = parameter.to(self._dtype)
        return self._copies[id(parameter)]


def _put(module: nn.Module, name: str, tensor: Any) -> None:
    """Put a tensor where a parameter stands, past the check that it is a parameter."""
    module._parameters[name] = tensor
    if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(name)] = tensor
