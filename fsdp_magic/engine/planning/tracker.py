"""ENGINE: what operators allocate, and when that is freed, as a log of events.

A dispatch mode sees every operator. The first time that a storage shows in an operator's output
it was allocated there; a weak reference tells when it is freed. Fake tensors have storages of the
right size without memory, so nothing is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_magic.core.planning.step_trace import Freed, Kind, Mark, Reached


class Taken(NamedTuple):
    """A storage was allocated, of one batch size: bytes, and the shape of what it was made for."""

    id: int
    bytes: int
    shape: tuple[int, ...]
    kind: Kind
    place: str
    operator: str


Logged = Taken | Freed | Reached


@dataclass(slots=True)
class _Storage:
    id: int
    reference: Any


@dataclass(slots=True)
class Log:
    """What a tracker writes down.

    Attributes:
        events: in order.
        place: dotted name of the module that runs.
        kind: of what is allocated now.
    """

    events: list[Logged] = field(default_factory=list)
    place: str = ""
    kind: Kind = "activation"

    def mark(self, mark: Mark, name: str = "") -> None:
        """Write down that the step passes a mark."""
        self.events.append(Reached(mark, name))


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs what operators allocate.

    Args:
        log: what is written to.
        ignored: tensors that are there before, and are not counted.
    """

    def __init__(self, log: Log, ignored: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self._ignored = [tensor.untyped_storage() for tensor in ignored]
        self._storages = {s._cdata: _Storage(-1, None) for s in self._ignored}
        self._next = 0

    def add(self, tensor: torch.Tensor, operator: str = "") -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        number = self._next
        self._next += 1
        reference = weakref.ref(storage, self._on_freed(key, number))
        self._storages[key] = _Storage(number, reference)
        log = self.log
        shape = tuple(tensor.shape)
        log.events.append(Taken(number, storage.nbytes(), shape, log.kind, log.place, operator))

    def _on_freed(self, key: int, number: int) -> Callable[[Any], None]:
        def freed(_: Any) -> None:
            known = self._storages.get(key)
            if known is not None and known.id == number:
                del self._storages[key]
                self.log.events.append(Freed(number))

        return freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it returns."""
        out = func(*args, **(kwargs or {}))
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, func._schema.name)
        return out
