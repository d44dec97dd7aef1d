"""ENGINE: functions of ``torch.nn.init`` that do nothing on the meta device, and calls of them.

Those functions give other operations from case to case too, so it is the call that is noted.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

Noting = Callable[[torch.Tensor, str, Callable[[], Any]], Any]
"""Told the tensor, the call in words, and how to make it."""
_NAMES = ("orthogonal_", "sparse_", "_no_grad_trunc_normal_")
_noting: list[Noting] = []
"""Who is told; the last is."""


@contextmanager
def noted_by(noting: Noting) -> Iterator[None]:
    """Have calls inside noted, by whatever name a module has imported the functions."""
    _noting.append(noting)
    _replace(_GENUINE, _NOTED)
    try:
        yield
    finally:
        _noting.pop()
        if not _noting:
            _replace(_NOTED, _GENUINE)


def _noted(genuine: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(genuine)

    @wraps(genuine)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _noting:
            return genuine(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        plain = {name: v for name, v in given.arguments.items() if name != "generator"}
        tensor = plain.pop("tensor")
        return _noting[-1](tensor, f"{genuine.__name__}({plain})", lambda: genuine(*args, **kwargs))

    return call


def _replace(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Put functions in the place of others, also in modules that took them by name."""
    transformers: Any = sys.modules.get("transformers.initialization")
    spaces = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    spaces.append(getattr(transformers, "TORCH_INIT_FUNCTIONS", {}))
    for space in spaces:
        for name in _NAMES:
            if space.get(name) is old[name]:
                space[name] = new[name]


_GENUINE = {name: getattr(nn.init, name) for name in _NAMES}
_NOTED = {name: _noted(function) for name, function in _GENUINE.items()}
