"""ENGINE: tensors without memory, of which small ones that are not random keep their values.

``FakeTensorMode`` gives tensors shapes and nothing else. Models look at a few values: whether a
mask masks anything, whether positions are those of packed sequences. Their masks and positions
come from ``arange``, ``ones`` and the like, so those are computed, and what follows from them
alone. Whatever else is asked for its value raises.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from fsdp_magic.engine.batches import mapped

_ATEN = torch.ops.aten
_MOST_ELEMENTS = 2**18
"""Of a tensor whose values are kept: those of a batch of ids, not of weights."""
_MAKERS = frozenset(
    {
        _ATEN.arange.default,
        _ATEN.arange.start,
        _ATEN.arange.start_step,
        _ATEN.zeros.default,
        _ATEN.ones.default,
        _ATEN.full.default,
        _ATEN.scalar_tensor.default,
        _ATEN.eye.default,
        _ATEN.eye.m,
        _ATEN.tril_indices.default,
        _ATEN.triu_indices.default,
    }
)
_ALIKE: Mapping[Any, Any] = {
    _ATEN.zeros_like.default: lambda out, _: torch.zeros(out.shape, dtype=out.dtype),
    _ATEN.ones_like.default: lambda out, _: torch.ones(out.shape, dtype=out.dtype),
    _ATEN.full_like.default: lambda out, args: torch.full(out.shape, args[1], dtype=out.dtype),
    _ATEN.new_zeros.default: lambda out, _: torch.zeros(out.shape, dtype=out.dtype),
    _ATEN.new_ones.default: lambda out, _: torch.ones(out.shape, dtype=out.dtype),
    _ATEN.new_full.default: lambda out, args: torch.full(out.shape, args[2], dtype=out.dtype),
}


class PlanningMode(FakeTensorMode):
    """Makes every tensor fake inside, and keeps what values can be known."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return no: nothing is compiled, and to look for that at each operator takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on shapes, and on values if it makes a small tensor of known ones."""
        if func.is_view and args and _has_value(args[0]):
            return self._view(func, types, args, kwargs or {})
        if func is _ATEN._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return self._grouped_mm(types, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _MAKERS and self._is_kept(out):
            self._keep(out, func, args, {**(kwargs or {}), "device": "cpu", "pin_memory": False})
        elif func in _ALIKE and self._is_kept(out):
            self._keep(out, _ALIKE[func], (out, args), {})
        return out

    def _view(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return views of a known tensor: they take no memory, which torch's own of values do."""
        base, value = args[0], args[0].constant
        base.constant = None
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            base.constant = value
        with no_dispatch():
            known = func(value, *args[1:], **kwargs)
        for view, its in zip(tree_leaves(out), tree_leaves(known), strict=True):
            if type(view) is FakeTensor:
                view.constant = its
                self.fake_tensor_converter.add_constant_storage_mapping(view)
        return out

    def _grouped_mm(self, types: Any, args: Any, kwargs: Any) -> Any:
        """Return what experts multiply to in a dtype that torch has kernels for, but no shapes.

        Source: ``_meta_grouped_mm_common`` in torch/_meta_registrations.py of torch 2.13.
        """
        dtype = args[0].dtype
        with self:
            as_known = (*(torch.empty_like(each, dtype=torch.bfloat16) for each in args[:2]),)
        grouped_mm = _ATEN._grouped_mm.default
        out: Any = super().__torch_dispatch__(grouped_mm, types, (*as_known, *args[2:]), kwargs)
        with self:
            return torch.empty_strided(out.shape, out.stride(), dtype=dtype)

    def _is_kept(self, out: Any) -> TypeGuard[FakeTensor]:
        """Return whether values are kept: of integers, and of matrices, such as masks."""
        if type(out) is not FakeTensor or out.constant is not None:
            return False
        return out.numel() <= _MOST_ELEMENTS and (not out.dtype.is_floating_point or out.ndim > 1)

    def _keep(self, out: FakeTensor, make: Any, args: Any, kwargs: Any) -> None:
        with no_dispatch():
            out.constant = make(*args, **kwargs)
        self.fake_tensor_converter.add_constant_storage_mapping(out)

    def with_values(self, value: Any) -> Any:
        """Return a batch of real tensors as fake ones, small integers with their values."""
        return mapped(value, self._with_value)

    def _with_value(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake: FakeTensor = self.from_tensor(tensor)
        if not tensor.is_floating_point() and tensor.numel() <= _MOST_ELEMENTS:
            with no_dispatch():  # else it is a fake one, too
                fake.constant = tensor.detach().cpu()
            self.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake


@contextmanager
def known_values() -> Iterator[None]:
    """Let what follows from known values be known inside, and models ask for it.

    Source: ``CONSTANT_NUMEL_LIMIT`` in torch/_subclasses/fake_tensor.py, and ``is_tracing`` in
    transformers/utils/import_utils.py, which takes every fake tensor for one without values.
    """
    limit = fake_tensor.CONSTANT_NUMEL_LIMIT
    library: Any = sys.modules.get("transformers.utils.import_utils")
    is_fake = getattr(library, "is_fake_tensor", None)
    fake_tensor.CONSTANT_NUMEL_LIMIT = _MOST_ELEMENTS
    if is_fake is not None:
        library.is_fake_tensor = _is_without_value
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit
        if is_fake is not None:
            library.is_fake_tensor = is_fake


def _has_value(value: Any) -> bool:
    return type(value) is FakeTensor and value.constant is not None


@contextmanager
def errors_told_once() -> Iterator[None]:
    """Have torch log no errors of fake tensors inside: they are raised, and told by that.

    Source: ``log.error`` in ``_dispatch_impl`` of torch/_subclasses/fake_tensor.py.
    """
    logger = logging.getLogger(fake_tensor.__name__)
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def _is_without_value(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.constant is None
