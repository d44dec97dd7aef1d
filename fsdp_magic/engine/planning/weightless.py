"""TRACER: a cell runs as it is, but large tensors that it makes have no memory.

Those are fake: shape, dtype and strides without content. What is small is real, because
constructors compute with it: rates of layers, tables, lengths. Whatever is computed of a fake
tensor is fake. Once the cell is over everything in the model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fsdp_magic.engine.optimizers import repoint
from fsdp_magic.engine.parallel.meta import SMALL_BYTES

_MAKERS = frozenset(
    (
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.empty_strided),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.arange),
        *(torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones),
        *(torch.Tensor.new_full, torch.Tensor.repeat, torch.Tensor.contiguous),
    )
)
"""Functions that make large tensors of nothing, or of small ones."""


class Weightless(TorchFunctionMode):
    """Gives no memory to large tensors.

    Args:
        fake: the mode that they belong to.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; one that makes a tensor first without memory."""
        kwargs = kwargs or {}
        if func not in _MAKERS or isinstance(args[0] if args else None, FakeTensor):
            return func(*args, **kwargs)
        with self._fake:
            made = func(*args, **kwargs)
        return made if made.nbytes >= SMALL_BYTES else func(*args, **kwargs)


@contextmanager
def weightless(fake: FakeTensorMode) -> Iterator[None]:
    """Let code run inside that makes large tensors, loads some from files, and compiles."""
    load, compiled, compile_module = torch.load, torch.compile, nn.Module.compile

    def loaded(*args: Any, **kwargs: Any) -> Any:
        with fake:  # torch then reads shapes only
            return load(*args, **kwargs)

    def as_it_is(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    def copied(tensor: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        """Copy deeply, as ``nn.Transformer`` does; views of torch's own copy would take memory."""
        if id(tensor) not in memo:
            memo[id(tensor)] = _like(tensor, fake)
        made: torch.Tensor = memo[id(tensor)]
        return made

    FakeTensor.__deepcopy__ = copied  # type: ignore[method-assign,assignment]
    torch.load, torch.compile = loaded, as_it_is
    nn.Module.compile = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        with Weightless(fake):
            yield
    finally:
        del FakeTensor.__deepcopy__  # torch.Tensor's own is back
        torch.load, torch.compile = load, compiled
        nn.Module.compile = compile_module  # type: ignore[method-assign]


def make_fake(model: nn.Module, optimizers: Iterable[Optimizer], fake: FakeTensorMode) -> None:
    """Have only fake tensors in a model, and let optimizers hold them.

    Args:
        model: changed in place; tied parameters stay tied.
        optimizers: of its parameters.
        fake: the mode that they belong to.
    """
    replaced: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and not _is_on_host(tensor):
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = _like(tensor, fake)
                    held[name] = replaced[id(tensor)]
    for optimizer in optimizers:
        repoint(optimizer, replaced)


def _is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fake, and not one of the meta device, where a cell may build."""
    return isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _like(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor, on the host, like a real one."""
    with fake:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    own = vars(made)
    own.update((name, value) for name, value in vars(tensor).items() if name not in own)
    return made
