"""ENGINE: sharded models that lost shards because ranks have fresh engines.

Nothing can be gathered from what is left of one, and a forward would wait for shards that are
nowhere. On a fresh rank its name is not bound at all. So a cell that uses it is refused, on
every rank and in the same words, until it is built again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.recovery import gone
from fsdp_magic.engine.modeling import leads_to
from fsdp_magic.engine.parallel.sharded_model import ShardedModel


class LostModels:
    """The names of models that lost shards.

    Args:
        namespace: the person's variables.
        has_snapshot: whether building them again loads one.
    """

    def __init__(self, namespace: Mapping[str, Any], *, has_snapshot: Callable[[], bool]) -> None:
        self._namespace = namespace
        self._has_snapshot = has_snapshot
        self._modules: dict[str, weakref.ref[nn.Module] | None] = {}

    def clear(self) -> None:
        """Forget them."""
        self._modules.clear()

    def lose(self, models: Iterable[ShardedModel]) -> None:
        """Note that another rank lost its shards of models."""
        for model in models:
            self._modules[model.name] = model.reference

    def told(self) -> tuple[str, ...]:
        """Return what a fresh rank must know."""
        return tuple(self._modules)

    def hear(self, names: Iterable[str]) -> None:
        """Take what another rank, or the kernel, told."""
        for name in names:
            self._modules.setdefault(name, None)

    def refuse(self, used: Collection[str]) -> None:
        """Raise if a cell uses a model that lost shards.

        Args:
            used: names, such as ``model``, that it reads before it binds them.

        Raises:
            FsdpError: if it does.
        """
        for name in list(self._modules):
            if not self._is_lost(name):
                del self._modules[name]
            elif _root(name) in used:
                raise FsdpError(gone([name], has_snapshot=self._has_snapshot()))

    def _is_lost(self, name: str) -> bool:
        """Return whether the name still stands for what lost shards, here or on other ranks."""
        reference = self._modules[name]
        if reference is None:  # this engine is fresh
            return _root(name) not in self._namespace
        module = reference()
        return module is not None and leads_to(name, self._namespace) is module


def _root(name: str) -> str:
    """Return the variable that an expression such as ``trainer.model`` begins with."""
    return name.partition(".")[0].partition("[")[0]
