"""ENGINE: units whose trainable parameters have one dtype each.

FSDP2 reduces the gradients of a unit in one collective, so it takes trainable parameters of one
dtype there. Norms kept in fp32 inside a block of bf16 become units of their own; frozen
parameters may be of any dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.parallel.wrapping import Fitness, Units

Sizes = dict[torch.dtype, int]


def of_one_dtype(
    root: nn.Module, units: Units, *, name: str, whole: Collection[nn.Parameter]
) -> Units:
    """Return units, inner ones first, of which each has trainable parameters of one dtype.

    Args:
        root: the model, not changed.
        units: as a rule gives them.
        name: of the model, for errors.
        whole: parameters that belong to no unit.

    Raises:
        FsdpError: naming all that cannot be taken apart, before anything is changed.
    """
    split = _Split(root, {id(part) for unit in units for part in unit}, whole)
    found: Units = []
    for unit in (*units, (root,)):
        found += [(part,) for part in split.parts_of(unit)]
        found.append(unit)
    if split.mixed:
        listed = ", ".join(split.mixed)
        raise FsdpError(
            f"trainable parameters of one unit must have one dtype; in {name} these differ within "
            f"modules that are gathered as one: {listed}; make them one with .to(dtype) before "
            "they are sharded"
        )
    return found[:-1]


class _Split:
    """Takes units apart by dtype.

    Attributes:
        mixed: what cannot be taken apart, as a person reads it.
    """

    def __init__(self, root: nn.Module, units: set[int], whole: Collection[nn.Parameter]) -> None:
        self.mixed: list[str] = []
        self._units = units
        self._whole = {id(parameter) for parameter in whole}
        self._fitness = Fitness(root)
        self._names = {id(p): dotted for dotted, p in root.named_parameters()}
        self._holders: dict[int, set[int]] = {}
        for part in root.modules():
            for parameter in part._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), set()).add(id(part))

    def parts_of(self, unit: tuple[nn.Module, ...]) -> list[nn.Module]:
        """Return the modules of a unit that must be units of their own."""
        own = [p for module in unit for p in self._trained(module)]
        sizes = _sizes(own)
        if len(sizes) < 2:
            return []
        for kept in sorted(sizes, key=lambda dtype: -sizes[dtype]):
            parts = [part for module in unit for part in self._others(module, kept)]
            taken = {id(p) for part in parts for p in self._trained(part)}
            if all(p.dtype == kept for p in own if id(p) not in taken):
                return parts
        self.mixed += [f"{self._names[id(p)]} ({_short(p.dtype)})" for p in own]
        return []

    def _trained(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters of a module that are in no inner unit, once each."""
        seen: set[int] = set()
        for part in self._inside(module):
            for parameter in part._parameters.values():
                if parameter is None or id(parameter) in seen or id(parameter) in self._whole:
                    continue
                seen.add(id(parameter))
                if parameter.requires_grad:
                    yield parameter

    def _inside(self, module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if id(child) not in self._units:
                yield from self._inside(child)

    def _others(self, module: nn.Module, kept: torch.dtype) -> Iterator[nn.Module]:
        """Yield the outermost modules inside one whose parameters are all of another dtype."""
        for child in module.children():
            if id(child) in self._units:
                continue
            sizes = _sizes(self._trained(child))
            if len(sizes) == 1 and kept not in sizes and self._may_be_unit(child):
                yield child
            elif set(sizes) - {kept}:
                yield from self._others(child, kept)

    def _may_be_unit(self, module: nn.Module) -> bool:
        """Return whether a module can be a unit, and shares no parameter with another."""
        inside = {id(part) for part in module.modules()}
        return self._fitness.may_be_unit(module) and all(
            self._holders[id(p)] <= inside for p in module.parameters()
        )


def _sizes(parameters: Iterable[nn.Parameter]) -> Sizes:
    sizes: Sizes = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return sizes


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
