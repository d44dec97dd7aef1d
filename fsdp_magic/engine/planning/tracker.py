"""ENGINE: what operators allocate, and when that is freed, as a log of events.

A dispatch mode sees every operator. The first time that a storage shows in an operator's output
it was allocated there; a weak reference tells when it is freed. Fake tensors have storages of the
right size without memory, so nothing is computed. It counts real tensors as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_magic.core.planning.step_trace import Freed, Kind, Mark, Reached
from fsdp_magic.engine.planning.cpu_kernels import WITH_MOMENTS, moments_of
from fsdp_magic.engine.planning.in_place import takes_place_of_first, uses_when_alone
from fsdp_magic.engine.planning.operations import Operations

_ATEN = torch.ops.aten


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
    """A storage that is alive.

    Attributes:
        id: of its event; that of what it was made in place of, if it was.
        bytes: of it.
        reference: weak.
        counted: whether its end is to be logged.
    """

    id: int
    bytes: int
    reference: Any
    counted: bool = True


@dataclass(slots=True)
class Log:
    """What a tracker writes down.

    Attributes:
        events: in order.
        place: dotted name of the module that runs.
        is_backward: whether backward runs.
        kind: of what is allocated, if it is not told from what runs.
        operations: what operators compute and move.
    """

    events: list[Logged] = field(default_factory=list)
    place: str = ""
    is_backward: bool = False
    kind: Kind | None = None
    operations: Operations = field(default_factory=Operations)

    def mark(self, mark: Mark, name: str = "") -> None:
        """Write down that the step passes a mark."""
        self.events.append(Reached(mark, name))

    def begin(self) -> None:
        """Begin anew, with no event."""
        self.events = []
        self.operations = Operations()

    def kind_now(self) -> Kind:
        """Return what an allocation is of: what is computed again needs gradients in backward."""
        if self.kind is not None:
            return self.kind
        return "temporary" if self.is_backward and not torch.is_grad_enabled() else "activation"


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs what operators allocate.

    Args:
        log: what is written to.
        ignored: tensors that are there before, and are not counted.
        cast: names of those that are cast while a unit computes: a copy in another dtype is of
            kind ``gathered``, and its place is the name.
        is_cuda: whether operators are CUDA's.
    """

    def __init__(
        self,
        log: Log,
        ignored: Iterable[torch.Tensor],
        *,
        cast: Mapping[str, torch.Tensor] | None = None,
        is_cuda: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self._ignored = [tensor.untyped_storage() for tensor in ignored]
        self._storages = {s._cdata: _Storage(-1, s.nbytes(), None, False) for s in self._ignored}
        self._cast = {t.untyped_storage()._cdata: name for name, t in (cast or {}).items()}
        self._next = 0
        self._is_paused = False
        self._is_cuda = is_cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return no: nothing is compiled, and to look for that at each operator takes long."""
        return False

    def __enter__(self) -> Any:
        """Watch operators, and storages that are resized by themselves."""
        uses_when_alone()  # measured before any backward runs
        resize = torch.UntypedStorage.resize_
        seen = self._resized

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            seen(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        """Watch no longer."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is allocated inside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # -- storages

    def add(self, tensor: torch.Tensor, operator: str = "") -> None:
        """Count a tensor's storage, unless it is counted already."""
        if tensor.layout is not torch.strided:
            return  # of its parts, which are tensors
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            self._resized(storage)
        else:
            self._take(storage, tuple(tensor.shape), operator)

    def hand_over(self, tensor: torch.Tensor) -> int:
        """Let a storage count as freed from here: somebody else counts it.

        Returns:
            The number under which it was allocated; -1: it was not seen to be.
        """
        known = self._storages.get(tensor.untyped_storage()._cdata)
        if known is None or not known.counted:
            return -1
        known.counted = False
        self.log.events.append(Freed(known.id))
        return known.id

    def living(self) -> set[int]:
        """Return the numbers of what is allocated."""
        return {each.id for each in self._storages.values() if each.counted}

    def _take(
        self, storage: torch.UntypedStorage, shape: tuple[int, ...], operator: str, name: str = ""
    ) -> None:
        number = self._next
        self._next += 1
        self._keep(storage, number)
        log = self.log
        kind: Kind = "gathered" if name else log.kind_now()
        log.events.append(Taken(number, storage.nbytes(), shape, kind, name or log.place, operator))

    def _keep(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata
        kept = _Storage(number, storage.nbytes(), None)

        def freed(_: Any) -> None:
            if self._storages.get(key) is kept:  # another may have its address by now
                del self._storages[key]
                if kept.counted:
                    self.log.events.append(Freed(number))

        kept.reference = weakref.ref(storage, freed)
        self._storages[key] = kept

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Count a known storage anew if it has another size than before."""
        known = self._storages.get(storage._cdata)
        if known is None or known.bytes == storage.nbytes() or not known.counted:
            return
        self.log.events.append(Freed(known.id))
        del self._storages[storage._cdata]
        self._take(storage, (storage.nbytes(),), "resize_")

    def _replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Count a new tensor as the old one, which it is outside a dispatch mode."""
        known = self._storages.get(old.untyped_storage()._cdata)
        storage = new.untyped_storage()
        if known is None or not known.counted or known.bytes != storage.nbytes():
            return
        known.counted = False
        self._keep(storage, known.id)

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it returns."""
        kwargs = kwargs or {}
        if self._is_paused or func.namespace == "prim":
            return func(*args, **kwargs)
        in_place = takes_place_of_first(func, args)
        out = func(*args, **kwargs)
        name = func._schema.name
        if func is _ATEN._to_copy.default:
            self._add_copy(args[0], out)
        if in_place:
            self._replace(args[0], out)
        if func in WITH_MOMENTS and not self._is_cuda:
            for part, copied in moments_of(func, args, out):
                self._take_for_a_moment(copied, tuple(part.shape), name)
                self.add(part, name)
        self.count(name, args, out)
        self.log.operations.count(func, args, kwargs, out)
        return out

    def count(self, operator: str, args: Any, out: Any) -> None:  # noqa: ARG002
        """Count what an operator returned."""
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, operator)

    def _take_for_a_moment(self, size: int, shape: tuple[int, ...], operator: str) -> None:
        number = self._next
        self._next += 1
        place = self.log.place
        self.log.events += [
            Taken(number, size, shape, "temporary", place, operator),
            Freed(number),
        ]

    def _add_copy(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Count a copy as that of a parameter, if it is one."""
        name = self._cast.get(tensor.untyped_storage()._cdata) if self._cast else None
        storage = copy.untyped_storage()
        if name is not None and storage._cdata not in self._storages:
            self._take(storage, tuple(copy.shape), "aten::_to_copy", name)
