"""ENGINE: sharded models that lost shards because a rank has a fresh engine.

Nothing can be gathered from what is left of one, and a forward would wait for shards that are
nowhere. On the fresh rank its name is not bound at all. So a cell that uses it is refused, on
every rank and in the same words, until it is built again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.units import ranks_named
from fsdp_magic.engine.modeling import leads_to
from fsdp_magic.engine.parallel.fsdp import ShardedModel


@dataclass(slots=True)
class LostModels:
    """The models that lost shards, by name: the ranks that had them.

    Args:
        namespace: the person's variables.
    """

    namespace: Mapping[str, Any] = field(repr=False)
    _ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _modules: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)

    def lose(self, models: Iterable[ShardedModel], ranks: tuple[int, ...]) -> None:
        """Note that ranks have lost their shards of models."""
        for model in models:
            self._ranks[model.name] = ranks
            self._modules[model.name] = model.reference

    def told(self) -> dict[str, tuple[int, ...]]:
        """Return what a fresh rank must know."""
        return dict(self._ranks)

    def hear(self, ranks: Mapping[str, tuple[int, ...]]) -> None:
        """Take what another rank told."""
        self._ranks.update(ranks)

    def refuse(self, used: Collection[str]) -> None:
        """Raise if a cell uses a model that lost shards.

        Args:
            used: names, such as ``model``, that it reads before it binds them.

        Raises:
            FsdpError: if it does.
        """
        for name, ranks in list(self._ranks.items()):
            if not self._is_lost(name):
                del self._ranks[name]
            elif _root(name) in used:
                raise FsdpError(
                    f"`{name}` lost the shards of {ranks_named(ranks)}; build it again in "
                    "%%fsdp_model"
                )

    def _is_lost(self, name: str) -> bool:
        """Return whether the name still stands for what lost shards, here or on other ranks."""
        reference = self._modules.get(name)
        if reference is None:  # this engine is fresh
            return _root(name) not in self.namespace
        module = reference()
        return module is not None and leads_to(name, self.namespace) is module


def _root(name: str) -> str:
    """Return the variable that an expression such as ``trainer.model`` begins with."""
    return name.partition(".")[0].partition("[")[0]
