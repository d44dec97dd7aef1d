"""ENGINE: what is laid around the forward of a module: compiling, casting, checkpointing.

The module stays the same object of the same class, with the same names of parameters. Its own
``forward`` attribute is the function of its class with layers around it, in a fixed order,
whatever the order in which they were asked for.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
Layer = Callable[[Forward], Forward]


class Order(enum.IntEnum):
    """From the inside out."""

    CHECKPOINTED_INSIDE = 0
    """The compiler plans what is computed again."""
    COMPILED = 1
    CAST = 2
    CHECKPOINTED = 3
    """What is computed again casts again, and runs what is compiled."""
    CACHING_NOTHING = 4


_KEPT_IN = "_fsdp_magic_layers"
"""The attribute of a module that holds what lies around its forward, so that it goes with it."""


def lay_around(module: nn.Module, order: Order, layer: Layer) -> None:
    """Put a layer around the forward of a module, in place of an earlier one of that order.

    Args:
        module: changed in place.
        order: where among the layers.
        layer: makes a function of that which it is around; both take the module first.
    """
    foreign = "forward" in vars(module) and not has_layers(module)
    if foreign or isinstance(module, torch.jit.ScriptModule):
        return  # it is not ours to replace
    vars(module)[_KEPT_IN] = {**_layers(module), order: layer}
    setattr(module, "forward", types.MethodType(forward_of(module), module))  # noqa: B010


def bare(root: nn.Module) -> None:
    """Take every layer off the modules of a model that an attempt to spread it left there."""
    for module in root.modules():
        if vars(module).pop(_KEPT_IN, None):
            vars(module).pop("forward", None)


def has_layers(module: nn.Module) -> bool:
    """Return whether the ``forward`` that a module has of its own is ours."""
    return _KEPT_IN in vars(module)


def is_computed_again(module: nn.Module) -> bool:
    """Return whether backward computes a module again, with all that is inside that layer."""
    return Order.CHECKPOINTED in _layers(module)


def forward_of(module: nn.Module) -> Forward:
    """Return the function of a module's class that computes it, with all layers around it."""
    function: Forward = type(module).forward
    for _, layer in sorted(_layers(module).items()):
        function = layer(function)
    return function


def _layers(module: nn.Module) -> dict[Order, Layer]:
    layers: dict[Order, Layer] = vars(module).get(_KEPT_IN, {})
    return layers
