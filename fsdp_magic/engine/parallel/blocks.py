"""ENGINE: the repeated blocks of a model, outermost only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
"""Containers that only hold: what is in them is called, and sharded, by itself."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, outermost only, in order.

    A block is a module with submodules of its own, in a container that holds at least two of its
    class.
    """
    return list({id(block): block for block in _repeated(module)}.values())


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return what a model without blocks repeats: layers without submodules, in lists."""
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
    found: dict[int, nn.Module] = {}
    for each in lists:
        classes = Counter(map(type, each))
        found |= {
            id(c): c
            for c in each
            if classes[type(c)] > 1 and next(c.parameters(), None) is not None
        }
    return list(found.values())


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module._modules.values() if child is not None]
    classes: Counter[type] = Counter()
    if isinstance(module, _CONTAINERS):
        classes.update(map(type, children))
    for child in children:
        if classes[type(child)] > 1 and _is_block(child):
            yield child
        else:
            yield from _repeated(child)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, WITHOUT_FORWARD):
        return False
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and any(True for _ in module.children())
