"""ENGINE: which modules of a model become units: its repeated blocks, outermost only.

A unit is gathered by all ranks together, so every rank must call it equally often and in the same
order. A block that forward may call on some ranks only (``choices.py``) is left to the unit that
holds it; what is idle on a rank inside a unit counts as zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from fsdp_magic.engine.parallel.choices import is_choice

WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
"""Containers that only hold: what is in them is called, and sharded, by itself."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, outermost only, in order.

    A block is a module with submodules of its own, in a container that holds at least two of its
    class. One that shares a parameter with the rest of the model is left to the root, which
    gathers tied parameters once; one that may be called on some ranks only, too.
    """
    repeated = {id(b): b for _, b, chosen in _repeated(module) if chosen is None}
    return [block for block in repeated.values() if not _shares_parameters(block, module)]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return all repeated blocks of a model, outermost only, in order: also those of no unit."""
    return list({id(block): block for _, block, _ in _repeated(module)}.values())


def chosen_parts(module: nn.Module) -> list[str]:
    """Return the dotted names of parts whose blocks are no units, since ranks may choose."""
    return list(dict.fromkeys(chosen for _, _, chosen in _repeated(module) if chosen is not None))


def _repeated(
    module: nn.Module, *, name: str = "", chosen: str | None = None
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield blocks by dotted name, with the part on the way to each that ranks choose."""
    children = {key: child for key, child in module._modules.items() if child is not None}
    classes: Counter[type] = Counter()
    if isinstance(module, _CONTAINERS):
        classes.update(map(type, children.values()))
    for key, child in children.items():
        dotted = f"{name}.{key}" if name else key
        choice = chosen
        if choice is None and is_choice(module, key):
            choice = dotted
        if classes[type(child)] > 1 and _is_block(child):
            yield dotted, child, choice
        else:
            yield from _repeated(child, name=dotted, chosen=choice)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, WITHOUT_FORWARD):
        return False
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and any(True for _ in module.children())


def _shares_parameters(block: nn.Module, root: nn.Module) -> bool:
    inside = {id(m) for m in block.modules()}
    own = {id(p) for p in block.parameters()}
    return any(
        id(parameter) in own
        for owner in root.modules()
        if id(owner) not in inside
        for parameter in owner._parameters.values()
    )
