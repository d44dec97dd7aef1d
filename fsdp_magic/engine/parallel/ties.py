"""ENGINE: units whose parameters are shared with other units.

A parameter lives in one unit. One that stands in two modules (a head that is tied to its
embedding) goes to the innermost unit that holds both, and the units on the way to them are none
any more: what holds both is gathered whenever either is called. A module that two units share as
a whole becomes a unit of its own, which each of them calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

Way = tuple[nn.Module, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter stands: the modules on the way to it, and those of them that are units."""

    way: Way
    units: Way


def without_ties(
    root: nn.Module, units: Sequence[nn.Module], *, may_be_unit: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """Return units such that each parameter is in one only.

    Args:
        root: the model, which is a unit in any case.
        units: those that a rule wants.
        may_be_unit: whether a module that two of them share can be one.
    """
    kept = {id(unit): unit for unit in units}
    while (pair := _torn(root, kept)) is not None:
        shared = _shared_module(*pair)
        if shared is not None and id(shared) not in kept and may_be_unit(shared):
            kept[id(shared)] = shared
            continue
        first, second = (place.units for place in pair)
        common = {id(a) for a, b in zip(first, second, strict=False) if a is b}
        for unit in (*first, *second):
            if id(unit) not in common:
                kept.pop(id(unit), None)
    return list(kept.values())


def _torn(root: nn.Module, units: dict[int, nn.Module]) -> tuple[_Place, _Place] | None:
    """Return two places of one parameter that are in different units; None if there are none."""
    first: dict[int, _Place] = {}
    for place in _places(root, units):
        for parameter in place.way[-1]._parameters.values():
            if parameter is None:
                continue
            other = first.setdefault(id(parameter), place)
            if other.units[-1:] != place.units[-1:]:
                return other, place
    return None


def _places(root: nn.Module, units: dict[int, nn.Module]) -> Iterator[_Place]:
    """Yield every module, once for each chain of units that leads to it."""
    seen: set[tuple[int, ...]] = set()

    def walk(way: Way, above: Way) -> Iterator[_Place]:
        module = way[-1]
        inside = (*above, module) if id(module) in units else above
        key = (id(module), *map(id, inside))
        if key in seen:
            return
        seen.add(key)
        yield _Place(way, inside)
        for child in module.children():
            yield from walk((*way, child), inside)

    return walk((root,), ())


def _shared_module(first: _Place, second: _Place) -> nn.Module | None:
    """Return the outermost module that two ways meet in again, after they have parted."""
    parted = next(
        (n for n, (a, b) in enumerate(zip(first.way, second.way, strict=False)) if a is not b), None
    )
    if parted is None:
        return None
    others = {id(module) for module in first.way[parted:]}
    return next((module for module in second.way[parted:] if id(module) in others), None)
