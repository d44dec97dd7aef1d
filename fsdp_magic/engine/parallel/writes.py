"""ENGINE: what was last done to the content of large tensors, whether they have any or not.

Every operation that torch dispatches is looked at, so a write through ``.data``, a view or
``nn.init`` counts like any other. Of each storage it is kept what wrote all of it last, and what
came after that. Two tensors that were treated alike have equal writes: a parameter on the meta
device, by a constructor, and the real one, by the rules of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.parallel.initialisers import noted_by

_OVERWRITING = frozenset(
    "aten::" + name
    for name in (
        "normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "cauchy_",
        "log_normal_", "geometric_", "bernoulli_",
    )
)  # fmt: skip
"""Operations after which nothing is left of what was there."""
_SAME: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "aten::zero_": ("aten::fill_", (0.0,)),
    **{f"aten::{name}": ("aten::fill_", (0.0,)) for name in ("zeros", "zeros_like", "new_zeros")},
    **{f"aten::{name}": ("aten::fill_", (1.0,)) for name in ("ones", "ones_like", "new_ones")},
    **{f"aten::{name}": ("aten::fill_", ()) for name in ("full", "full_like", "new_full")},
    **{f"aten::{name}": ("aten::normal_", ()) for name in ("randn", "randn_like")},
    **{f"aten::{name}": ("aten::uniform_", ()) for name in ("rand", "rand_like")},
}
"""Operations that have the result of another, with the arguments that it would have more."""
_COPYING = ("aten::clone", "aten::_to_copy")
"""Operations whose result is what their argument is."""
_NO_CONTENT = ("aten::empty", "aten::new_empty")
"""How the names of operations begin that make tensors without content."""
_NO_VALUES = ("generator", "dtype", "layout", "device", "pin_memory", "memory_format")
_PLAIN = (int, float, complex, str)
_NOT_BEFORE = (
    "with --meta large parameters have no values before the cell is over, and it reads some or "
    "moves them to a device; do that in a later cell, or leave --meta out"
)
_READING = ("aten::_local_scalar_dense", "aten::_to_copy")


@dataclass(frozen=True, slots=True)
class Write:
    """An operation that wrote to a tensor.

    Attributes:
        brief: the operation and its plain arguments.
        text: with where it wrote, and what made the tensors that it read.
        copies: whether it took the values of another tensor.
    """

    brief: str = field(compare=False)
    text: str
    copies: bool = field(default=False, compare=False)


Writes = tuple[Write, ...]


class WritesMode(TorchDispatchMode):
    """Notes while it is entered what is done to tensors.

    Args:
        least_bytes: smaller tensors are not looked at.
    """

    def __init__(self, least_bytes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least_bytes = least_bytes
        self._is_looking = True
        self._entered = ExitStack()
        # a weak reference keeps the address of a storage from being given to another
        self._known: dict[int, tuple[StorageWeakRef, Writes]] = {}

    def __enter__(self) -> WritesMode:
        self._entered.enter_context(noted_by(self._call))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._entered.close()

    def begin(self, tensor: torch.Tensor) -> None:
        """Count a tensor as one that nothing has written yet."""
        self._set(tensor, ())

    def of(self, tensor: torch.Tensor) -> Writes | None:
        """Return what was done to a tensor; None: it was made elsewhere."""
        known = self._known.get(_address(tensor))
        return None if known is None else known[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_reading(func, args, kwargs)
        result = func(*args, **kwargs)
        if not self._is_looking:
            return result
        schema, written = func._schema, []
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                written += [(each, argument.is_out) for each in _tensors(value)]
        if not written:
            _refuse_garbage(result, args, kwargs)
        for tensor, is_out in written:
            self._add(tensor, schema.name, args, kwargs, is_out=is_out)
        if not written and any(each.alias_info is None for each in schema.returns):
            for tensor in _tensors(result):
                self._make(tensor, schema.name, args, kwargs)
        return result

    def _add(
        self, tensor: torch.Tensor, name: str, args: Any, kwargs: Any, *, is_out: bool
    ) -> None:
        write = self._write(name, args, kwargs, written=tensor)
        self._append(tensor, write, is_overwriting=is_out or name in _OVERWRITING)

    def _call(self, tensor: torch.Tensor, text: str, genuine: Callable[[], Any]) -> Any:
        """Let a function initialise a tensor, and note that instead of its operations."""
        self._is_looking = False
        try:
            result = genuine()
        finally:
            self._is_looking = True
        self._append(tensor, Write(text, text), is_overwriting=True)
        return result

    def _append(self, tensor: torch.Tensor, write: Write, *, is_overwriting: bool) -> None:
        before, text = self.of(tensor), write.text
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            before = () if is_overwriting else before
        else:
            text += f" at {tensor.storage_offset()} {tuple(tensor.shape)} {tensor.stride()}"
        if before is not None:  # else it was made elsewhere, and nobody asks
            self._set(tensor, (*before, Write(write.brief, text, write.copies)))

    def _make(self, tensor: torch.Tensor, name: str, args: Any, kwargs: Any) -> None:
        is_padded = name == "aten::constant_pad_nd" and tensor.shape == args[0].shape
        if name in _COPYING or is_padded:  # by nothing, as transformers pads biases
            before = self.of(args[0])
            if before is None:
                self._known.pop(_address(tensor), None)
            else:
                self._set(tensor, before)
        elif name.startswith(_NO_CONTENT):
            self._set(tensor, ())
        else:
            self._set(tensor, (self._write(name, args, kwargs, written=tensor),))

    def _write(self, name: str, args: Any, kwargs: Any, *, written: torch.Tensor) -> Write:
        values = (*args, *(value for key, value in kwargs.items() if key not in _NO_VALUES))
        same, more = _SAME.get(name, (name, ()))
        plain = [repr(_number(v)) for v in (*values, *more) if isinstance(v, _PLAIN)]
        brief = f"{same}({', '.join(plain)})"
        read = [t for t in _tensors(values) if t is not written]
        made = [known[-1].brief if (known := self.of(t)) else "" for t in read]
        copies = name == "aten::copy_" and bool(read)
        return Write(brief, f"{brief} of {made}" if read else brief, copies)

    def _set(self, tensor: torch.Tensor, writes: Writes) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= self._least_bytes:
            known = self._known.get(storage._cdata)
            reference = StorageWeakRef(storage) if known is None else known[0]  # type: ignore[no-untyped-call]
            self._known[storage._cdata] = reference, writes


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _number(value: Any) -> Any:
    """Return 2 as 2.0: which of them a function was given makes no difference."""
    return float(value) if isinstance(value, int) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of an argument or a result."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        yield value


def _refuse_reading(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if values are asked for that a tensor without memory does not have.

    Raises:
        FsdpError: saying when they are there.
    """
    name, device = func._schema.name, kwargs.get("device")
    if name == "aten::copy_":
        reads = args[1].is_meta and not args[0].is_meta
    else:
        reads = name in _READING and args[0].is_meta
        if name == "aten::_to_copy":
            reads = reads and device is not None and torch.device(device).type != "meta"
    if reads:
        raise FsdpError(_NOT_BEFORE)


def _refuse_garbage(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if values came of a tensor without memory, as torch's matrix products let them.

    Raises:
        FsdpError: saying when they are there.
    """
    if "device" in kwargs or all(tensor.is_meta for tensor in _tensors(result)):
        return
    if any(tensor.is_meta for tensor in _tensors((*args, *kwargs.values()))):
        raise FsdpError(_NOT_BEFORE)
