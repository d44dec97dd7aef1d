"""ENGINE: the models that are held whole, and the end of backwards that reach them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_magic.engine.parallel import torch_private

if TYPE_CHECKING:
    from fsdp_magic.engine.parallel.whole_model import WholeModel

_MODELS: weakref.WeakKeyDictionary[nn.Module, WholeModel] = weakref.WeakKeyDictionary()
"""By their roots, in the order in which they were made."""
_LATEST: list[tuple[int, list[WholeModel]]] = []
"""The newest backward outside of a step: its number, and the models that it reached."""


def remember(model: WholeModel) -> None:
    """Count a model among those that are held whole, as long as it lives."""
    _MODELS[model.module] = model


def forget(model: WholeModel) -> None:
    """Count it no more."""
    _MODELS.pop(model.module, None)


def living() -> list[WholeModel]:
    """Return the models that are held whole."""
    return list(_MODELS.values())


def is_whole(module: nn.Module) -> bool:
    """Return whether a module is the root of one."""
    return module in _MODELS


def is_any_held_whole(parameters: Collection[torch.Tensor]) -> bool:
    """Return whether one of some parameters belongs to one."""
    ids = {id(parameter) for parameter in parameters}
    return any(id(p) in ids for model in living() for p in model.module.parameters())


def reduce_after_backward(model: WholeModel) -> None:
    """Reduce a model's gradients when the backward that is running ends."""
    number = torch_private.backward_number()
    if _LATEST and _LATEST[0][0] == number:
        if model not in _LATEST[0][1]:
            _LATEST[0][1].append(model)
        return
    reached = [model]
    _LATEST[:] = [(number, reached)]
    torch_private.at_end_of_backward(functools.partial(_reduce_all, reached))


def _reduce_all(reached: list[WholeModel]) -> None:
    """Reduce in the order in which models were made; a backward may reach them in any."""
    _LATEST.clear()
    for model in living():
        if model in reached:
            model.reduce()
