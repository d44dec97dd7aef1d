"""ENGINE: which modules of a model become units, by the rule that ``--wrap`` gives.

A unit is gathered by all ranks when it is called, and freed after it. So whatever the rule says,
a module is one only if it is called: not a container without a forward, not a part whose
parameters the code of its holder reads by itself (``direct_reads.py``), and not one that some
ranks may call and others not (``choices.py``). Those are left to the unit that holds them. Ties
are seen to last (``ties.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs.wrap import WORDS, class_names, least_parameters
from fsdp_magic.core.units import count_text
from fsdp_magic.core.wording import suggestion
from fsdp_magic.engine.parallel.blocks import repeated_blocks, repeated_layers
from fsdp_magic.engine.parallel.choices import is_choice
from fsdp_magic.engine.parallel.direct_reads import read_directly
from fsdp_magic.engine.parallel.ties import without_ties

Units = list[tuple[nn.Module, ...]]
_LISTED = 12
_LARGE = 10**6
"""Parameters from which it matters that a model is gathered at once."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What a rule makes of a model.

    Attributes:
        units: each the modules that are gathered together, inner ones first; not the root.
        chosen: dotted names of parts that the rule wants, and that ranks may choose among.
        whole: why the rule makes no units though units were meant; or nothing.
    """

    units: Units
    chosen: tuple[str, ...]
    whole: str = ""


def units_of(module: nn.Module, rule: str) -> Units:
    """Return the units of a model, inner ones first; the root is not among them.

    Args:
        module: the model, not changed.
        rule: as ``--wrap`` gives it.

    Raises:
        FsdpError: if the rule names a class that the model has no module of.
    """
    return wrap(module, rule).units


def wrap(module: nn.Module, rule: str) -> Wrapping:
    """Return what a rule makes of a model; see ``units_of``."""
    fitness = Fitness(module)
    wanted = [part for part in _wanted(module, rule, fitness) if part is not module]
    units = [part for part in wanted if fitness.may_be_unit(part)]
    units = without_ties(module, units, may_be_unit=fitness.may_be_unit)
    kept = {id(unit) for unit in units}
    chosen = dict.fromkeys(fitness.chosen[id(p)] for p in wanted if id(p) in fitness.chosen)
    return Wrapping(
        units=[(part,) for part in _inner_first(module) if id(part) in kept],
        chosen=tuple(chosen),
        whole="" if wanted else _why_whole(module, rule),
    )


def _why_whole(module: nn.Module, rule: str) -> str:
    if class_names(rule):
        listed = _listed([part for part in module.modules() if part is not module])
        parts = f"; name a class of its parts: {listed}" if listed else ""
        return (
            f"--wrap {rule} is the class of the model itself, so all of it is gathered at "
            f"once{parts}"
        )
    if rule == "blocks" and sum(p.numel() for p in module.parameters()) >= _LARGE:
        return (
            "the model has no repeated blocks, so all of it is gathered at once; --wrap size:1M "
            "or --wrap CLASS gathers it in parts"
        )
    return ""


def left_notes(name: str, wrapping: Wrapping) -> list[str]:
    """Return a sentence on what the rule wanted and is left to what holds it."""
    if wrapping.whole:
        return [f"{name}: {wrapping.whole}"]
    if not wrapping.chosen:
        return []
    parts = ", ".join(f"{name}.{part}" for part in wrapping.chosen)
    return [
        f"{parts}: forward may call these on some ranks only, so they are gathered together with "
        "what holds them, not one by one"
    ]


def size_notes(name: str, module: nn.Module, rule: str) -> list[str]:
    """Return a sentence where no part of a model has as many parameters as the rule asks for."""
    least = least_parameters(rule)
    sizes = {
        dotted: sum(p.numel() for p in part.parameters())
        for dotted, part in module.named_modules()
        if part is not module and has_forward(part)
    }
    if least is None or max(sizes.values(), default=0) >= least:
        return []
    blocks = {id(block) for block in repeated_blocks(module)}
    named = {dotted: id(part) for dotted, part in module.named_modules()}
    of = [dotted for dotted in sizes if named[dotted] in blocks] or list(sizes)
    largest = max(of, key=lambda dotted: sizes[dotted], default="")
    has = f"; {name}.{largest} has {count_text(sizes[largest])}" if largest else ""
    return [
        f"no module of {name} has {count_text(least)} parameters, so the whole model is one unit"
        f"{has}"
    ]


class Fitness:
    """Which modules of a model can be units.

    Attributes:
        chosen: by the id of a module that some ranks may call and others not, the dotted name of
            the part on the way to it that they choose.
    """

    def __init__(self, root: nn.Module) -> None:
        self.chosen: dict[int, str] = {}
        self._unfit: set[int] = set()
        self._choices: dict[tuple[type, str, type], bool] = {}
        seen: set[tuple[int, bool]] = set()
        self._walk(root, "", None, seen)

    def may_be_unit(self, module: nn.Module) -> bool:
        """Return whether a module can be a unit of its own."""
        if id(module) in self._unfit or id(module) in self.chosen:
            return False
        return has_forward(module) and next(module.parameters(), None) is not None

    def _walk(
        self, module: nn.Module, name: str, chosen: str | None, seen: set[tuple[int, bool]]
    ) -> None:
        if (id(module), chosen is None) in seen:
            return
        seen.add((id(module), chosen is None))
        if chosen is not None:
            self.chosen[id(module)] = chosen
        if isinstance(module, (torch.jit.ScriptModule, ParametrizationList)):
            self._unfit |= {id(part) for part in module.modules()}
        self._unfit |= {id(part) for part in read_directly(module)}
        for key, child in module._modules.items():
            if child is not None:
                dotted = f"{name}.{key}" if name else key
                way = chosen or (dotted if self._is_choice(module, key, child) else None)
                self._walk(child, dotted, way, seen)

    def _is_choice(self, owner: nn.Module, key: str, child: nn.Module) -> bool:
        kinds = (type(owner), key, type(child))
        if kinds not in self._choices:
            self._choices[kinds] = is_choice(owner, key)
        return self._choices[kinds]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; a list of modules only holds them."""
    return getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward


def _wanted(module: nn.Module, rule: str, fitness: Fitness) -> list[nn.Module]:
    """Return the modules that a rule asks for, whether they can be units or not."""
    if rule == "blocks":
        return repeated_blocks(module) or repeated_layers(module)
    least = least_parameters(rule)
    if least is not None:
        return _from_size(module, least, fitness.may_be_unit)
    return _of_classes(module, class_names(rule))


def _from_size(
    root: nn.Module, least: int, may_be_unit: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """Return modules with so many parameters that are in no smaller one of them.

    Source: ``size_based_auto_wrap_policy`` and ``_recursive_wrap`` of torch/distributed/fsdp/
    wrap.py, the ``min_num_params`` rule. An attention layer of torch is not taken apart.
    """
    found: dict[int, nn.Module] = {}
    unfit: list[nn.Module] = []

    def taken(module: nn.Module) -> int:
        """Return how many parameters of a module units took, itself among them."""
        size = sum(p.numel() for p in module.parameters())
        if size < least or id(module) in found:
            return size if id(module) in found else 0
        whole = isinstance(module, nn.MultiheadAttention)
        inside = 0 if whole else sum(taken(child) for child in module.children())
        if size - inside < least:
            return inside
        if not may_be_unit(module):
            unfit.append(module)
            return inside
        found[id(module)] = module
        return size

    for child in root.children():
        taken(child)
    return [*found.values(), *unfit]


def _of_classes(root: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Return modules of classes with one of some names, or made from them.

    Raises:
        FsdpError: naming those that no module has.
    """
    parts = list(root.modules())
    missing = [name for name in names if not any(_is_a(part, name) for part in parts)]
    if missing:
        raise FsdpError(_unknown_classes(parts, missing))
    wanted = [part for part in parts if any(_is_a(part, name) for name in names)]
    if not any(map(has_forward, wanted)) and wanted:
        raise FsdpError(
            f"--wrap {','.join(names)}: these only hold modules and are never called; name the "
            f"class of what is in them: {_listed(parts)}"
        )
    return wanted


def _is_a(module: nn.Module, name: str) -> bool:
    kinds = type(module).__mro__
    return any(kind.__name__ == name for kind in kinds if kind not in (nn.Module, object))


def _unknown_classes(parts: list[nn.Module], missing: list[str]) -> str:
    word = next((name for name in missing if name.lower() in WORDS), None)
    if word is not None:
        return (
            f"--wrap: {word} is a rule of its own and cannot stand beside class names; give "
            f"--wrap {word.lower()}, or names alone: the model has {_listed(parts)}"
        )
    known = [type(part).__name__ for part in parts]
    near = suggestion(missing[0], dict.fromkeys((*known, "blocks", "none")))
    return (
        f"--wrap: the model has no module of class {', '.join(missing)}; {near}"
        f"{'It' if near else 'it'} has {_listed(parts)}"
    )


def _listed(parts: list[nn.Module]) -> str:
    """Return the classes that can be named, largest modules first."""
    sizes: dict[str, int] = {}
    for part in parts:
        if has_forward(part) and (size := sum(p.numel() for p in part.parameters())):
            sizes.setdefault(type(part).__name__, size)
    names = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _inner_first(root: nn.Module) -> Iterator[nn.Module]:
    """Yield every module after those inside it."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                yield from walk(child)
            yield module

    return walk(root)
