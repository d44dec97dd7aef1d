"""ENGINE: spreading undone in place: the modules as they were before, and as they were spread.

Whatever a strategy does to modules (a class of its own, hooks, methods, wrappers around parts) is
found by comparing them before and after: those changes are kept with the model, and can be taken
back one by one, so that what the person changed since stays. No strategy needs to know.
Parameters are not among them: who takes the changes back gives the modules new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from fsdp_magic.engine.parallel import torch_private

_KEPT_IN = "_fsdp_magic_changes"
"""The attribute of a spread model that holds what spreading changed."""
_ABSENT = object()


@cache
def _registries() -> tuple[str, ...]:
    """Return the attributes of a module that hold its parts and its hooks."""
    return tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))


@dataclass(slots=True)
class _ModuleShape:
    """One module as it was: its class, its attributes, and what is in its registries."""

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    registries: dict[str, dict[Any, Any]]
    state: Any

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleShape:
        """Keep a module as it is now."""
        attributes = dict(vars(module))
        registries = {n: dict(attributes[n]) for n in _registries() if n in attributes}
        state = torch_private.state_reference(module)
        return cls(module, type(module), attributes, registries, state)

    def put_back(self) -> None:
        """Make the module what it was; its registries stay the objects that they were."""
        self.module.__class__ = self.kind
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for name, content in self.registries.items():
            registry = self.attributes[name]
            registry.clear()
            registry.update(content)
        torch_private.put_state_reference(self.module, self.state)


class Shape:
    """Modules as they were, whole: classes, attributes, hooks, parts, parameters.

    Args:
        modules: each with its own parts only.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # a compiled script keeps its parts elsewhere, and no strategy changes it
        self.parts = [
            _ModuleShape.of(m) for m in modules if not isinstance(m, torch.jit.ScriptModule)
        ]

    def put_back(self) -> None:
        """Make every module what it was."""
        for part in self.parts:
            part.put_back()


@dataclass(slots=True)
class _Change:
    """One entry that spreading changed: where, from what, to what."""

    entries: dict[Any, Any]
    key: Any
    before: Any
    after: Any

    def take_back(self) -> None:
        """Have the entry as before, unless somebody else changed it since."""
        if self.entries.get(self.key, _ABSENT) is not self.after:
            return
        if self.before is _ABSENT:
            del self.entries[self.key]
        else:
            self.entries[self.key] = self.before


class Changes:
    """What spreading changed in modules, beside their parameters.

    Args:
        before: the modules before.
        root: the model now.
    """

    def __init__(self, before: Shape, root: nn.Module) -> None:
        self.modules: list[nn.Module] = [part.module for part in before.parts]
        self._kinds: list[tuple[nn.Module, type, type]] = []
        self._entries: list[_Change] = []
        for part in before.parts:
            if type(part.module) is not part.kind:
                self._kinds.append((part.module, part.kind, type(part.module)))
            self._entries += _changes_of(part)
        vars(root)[_KEPT_IN] = self

    def take_back(self) -> None:
        """Undo them all."""
        for change in reversed(self._entries):
            change.take_back()
        for module, before, after in self._kinds:
            if type(module) is after:
                module.__class__ = before
        for module in self.modules:
            torch_private.put_state_reference(module, None)

    def __deepcopy__(self, memo: object) -> None:
        """Return nothing: a copy of a model is none that we spread."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing of it in what is pickled."""
        return (type(None), ())


def changes_of(root: nn.Module) -> Changes:
    """Return what spreading a model changed."""
    changes: Changes = vars(root)[_KEPT_IN]
    return changes


def _changes_of(part: _ModuleShape) -> Iterator[_Change]:
    now = vars(part.module)
    yield from _differences(now, part.attributes)
    for name, before in part.registries.items():
        if name not in ("_parameters", "_buffers"):
            yield from _differences(now[name], before)


def _differences(now: dict[Any, Any], before: dict[Any, Any]) -> Iterator[_Change]:
    for key in dict.fromkeys((*before, *now)):
        first, second = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if first is not second:
            yield _Change(now, key, first, second)
