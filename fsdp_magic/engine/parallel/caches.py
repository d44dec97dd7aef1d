"""ENGINE: the caches of keys and values that decoders of transformers fill."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from fsdp_magic.engine.parallel.forwards import Forward, Order, lay_around


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of keys and values, as transformers has them."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def as_it_is(cache: Any) -> Any:
    """Return a copy of a cache with the same tensors, which are replaced and not written to."""
    kept = copy.copy(cache)
    for name, value in vars(kept).items():
        if is_cache(value):
            setattr(kept, name, as_it_is(value))
        elif isinstance(value, list):
            setattr(kept, name, [copy.copy(layer) for layer in value])
        elif isinstance(value, dict):
            setattr(kept, name, dict(value))
    return kept


def fill_none(module: nn.Module) -> None:
    """Let a transformers model fill no cache in a forward with gradients, in place.

    Nothing reads it in training. It would keep what is computed again in backward, and a layer
    that finds its place in it by its number would be compiled for each number.
    """
    if any(_uses_cache(part) for part in module.modules()):
        lay_around(module, Order.CACHING_NOTHING, _caching_nothing)


def _caching_nothing(function: Forward) -> Forward:
    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(self, *args, **kwargs)
        configs = {id(c): c for part in self.modules() if (c := _uses_cache(part)) is not None}
        try:
            for config in configs.values():
                config.use_cache = False
            return function(self, *args, **kwargs)
        finally:
            for config in configs.values():
                config.use_cache = True

    return forward


def _uses_cache(module: nn.Module) -> Any:
    """Return the configuration of a module if it says that a cache is filled."""
    config = getattr(module, "config", None)
    return config if getattr(config, "use_cache", None) is True else None
