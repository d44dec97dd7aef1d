"""ENGINE: what every rank holds whole, of models, and the end of backwards that reach it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fsdp_magic.core.placement import ParameterPlacement
from fsdp_magic.engine.parallel import torch_private

if TYPE_CHECKING:
    from fsdp_magic.engine.parallel.whole_model import WholeModel

_MODELS: weakref.WeakKeyDictionary[nn.Module, WholeModel] = weakref.WeakKeyDictionary()
"""By their roots, in the order in which they were made."""


class Averaged(Protocol):
    """What has gradients that are averaged after a backward outside of a step."""

    def reduce(self) -> None:
        """Make gradients those of all ranks."""

    def unsynced(self, parameters: Collection[int]) -> AbstractContextManager[None]:
        """Leave the gradients of parameters, of which the ids are given, on this rank inside."""


_AVERAGED: weakref.WeakKeyDictionary[nn.Module, Averaged] = weakref.WeakKeyDictionary()
"""By the roots of models, in the order in which they were made."""
_LATEST: list[tuple[int, list[Averaged]]] = []
"""The newest backward outside of a step: its number, and what it reached."""


def remember(model: WholeModel) -> None:
    """Count a model among those that are held whole, as long as it lives."""
    _MODELS[model.module] = model
    remember_averaged(model.module, model)


def forget(model: WholeModel) -> None:
    """Count it no more."""
    _MODELS.pop(model.module, None)
    forget_averaged(model.module)


def remember_averaged(root: nn.Module, averaged: Averaged) -> None:
    """Have gradients averaged after backwards, as long as their model lives."""
    _AVERAGED[root] = averaged


def forget_averaged(root: nn.Module) -> None:
    """Have them averaged no more."""
    _AVERAGED.pop(root, None)


def living() -> list[WholeModel]:
    """Return the models that are held whole."""
    return list(_MODELS.values())


@contextmanager
def unsynced(parameters: Collection[int]) -> Iterator[None]:
    """Leave the gradients of parameters that are held whole on this rank inside.

    Args:
        parameters: their ids.
    """
    with ExitStack() as stack:
        for averaged in list(_AVERAGED.values()):
            stack.enter_context(averaged.unsynced(parameters))
        yield


def is_whole(module: nn.Module) -> bool:
    """Return whether a module is the root of one."""
    return module in _MODELS


def is_any_held_whole(parameters: Collection[torch.Tensor]) -> bool:
    """Return whether one of some parameters belongs to one."""
    ids = {id(parameter) for parameter in parameters}
    return any(id(p) in ids for model in living() for p in model.module.parameters())


def replicated(name: str, parameter: torch.Tensor, *, ranks: int) -> ParameterPlacement:
    """Return where a parameter lives that every rank holds whole."""
    return ParameterPlacement(
        name=name,
        shape=tuple(parameter.shape),
        local_shapes=(tuple(parameter.shape),) * ranks,
        dtype=str(parameter.dtype).removeprefix("torch."),
        element_bytes=parameter.element_size(),
        kind="replicated",
        unit="",
    )


@contextmanager
def requiring_gradient(parameter: nn.Parameter) -> Iterator[None]:
    """Have a parameter require a gradient inside: else torch registers no hook on it."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(before)


def reduce_after_backward(averaged: Averaged) -> None:
    """Reduce gradients when the backward that is running ends."""
    number = torch_private.backward_number()
    if _LATEST and _LATEST[0][0] == number:
        if averaged not in _LATEST[0][1]:
            _LATEST[0][1].append(averaged)
        return
    reached = [averaged]
    _LATEST[:] = [(number, reached)]
    reduce = functools.partial(_reduce_all, reached)
    # after what FSDP2 does at the end of the same backward, which may have been asked for later:
    # else ranks could wait for each other in two collectives
    torch_private.at_end_of_backward(functools.partial(torch_private.at_end_of_backward, reduce))


def _reduce_all(reached: list[Averaged]) -> None:
    """Reduce in the order in which models were made; a backward may reach them in any."""
    _LATEST.clear()
    for averaged in list(_AVERAGED.values()):
        if averaged in reached:
            averaged.reduce()
