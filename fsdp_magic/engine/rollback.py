"""ENGINE: what a failed step and a trial run put back.

A step that is not finished has changed random states and module buffers, and ``StepUndo`` keeps
those from before it; weights and optimizer state change only once all ranks agree. A trial changes
everything: its ``Snapshot`` is a copy of this rank's part of it, in memory on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.engine import randomness
from fsdp_magic.engine.host_memory import copied_to_host

_SMALL_BYTES = 64 * 1024
"""Buffers up to this size are kept before every step, whether they are known to move or not."""


@dataclass(slots=True)
class _Buffer:
    """A buffer of a module as it was: where it is kept, its content, and its version then."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    kept: torch.Tensor
    version: int

    @classmethod
    def of(cls, owner: nn.Module, name: str) -> _Buffer:
        """Keep a buffer as it is now."""
        buffer = owner._buffers[name]
        assert buffer is not None
        return cls(owner, name, buffer, buffer.detach().clone(), buffer._version)

    @property
    def is_the_same(self) -> bool:
        """Whether no other tensor was put in its place."""
        return self.owner._buffers.get(self.name) is self.buffer

    @property
    def may_move(self) -> bool:
        """Whether steps may write to it.

        Source: ``native_batch_norm`` writes running statistics without raising their version.
        """
        if isinstance(self.owner, _NormBase) or self.kept.nbytes <= _SMALL_BYTES:
            return True
        return not self.is_the_same or self.buffer._version != self.version

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the buffer, and what is in it, what it was."""
        self.owner._buffers[self.name] = self.buffer  # the cell may have bound another one
        self.buffer.copy_(self.kept)


class StepUndo:
    """What a step that is not finished puts back: random states and buffers.

    Most buffers are constants, and some of them are large, such as a causal mask. So all are kept
    for the first step of a run only, and later those that may move.

    Args:
        modules: whose buffers are kept.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._buffers: list[_Buffer] | None = None
        self._moving: list[_Buffer] | None = None
        self._random: dict[str, Any] | None = None

    @contextmanager
    def unless_kept(self) -> Iterator[None]:
        """Put everything back after the inside, unless it has called ``keep``."""
        self._random = randomness.capture()
        buffers = self._kept_buffers()
        self._buffers = buffers
        try:
            yield
        finally:
            if self._random is not None:
                randomness.restore(self._random)
                for each in buffers:
                    each.put_back()

    def keep(self) -> None:
        """Say that the step is finished."""
        self._random = None
        if self._moving is None:
            self._moving = [each for each in self._buffers or () if each.may_move]
        self._buffers = None

    @torch.no_grad()
    def _kept_buffers(self) -> list[_Buffer]:
        if self._moving is None:
            return _buffers_of(self._modules)
        present = [b for b in self._moving if b.owner._buffers.get(b.name) is not None]
        self._moving = [b if b.is_the_same else _Buffer.of(b.owner, b.name) for b in present]
        alike: dict[tuple[Any, Any], list[_Buffer]] = {}
        for each in self._moving:
            alike.setdefault((each.buffer.dtype, each.buffer.device), []).append(each)
        for same in alike.values():
            torch._foreach_copy_([each.kept for each in same], [each.buffer for each in same])
        return self._moving


def _buffers_of(modules: Iterable[nn.Module]) -> list[_Buffer]:
    parts = {id(part): part for module in modules for part in module.modules()}
    return [
        _Buffer.of(part, name)
        for part in parts.values()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]


class Snapshot:
    """What training changes, as it was when this was made.

    Args:
        modules: whose parameters, buffers and modes are kept.
        parameters: trained ones beside those of the modules.
        optimizers: whose state and hyperparameters are kept.
        schedulers: whose state is kept.
        without: ids of parameters of the modules that are not kept.
        on_host: whether copies lie in host memory, which takes nothing from the device.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Iterable[torch.Tensor],
        optimizers: Iterable[Optimizer],
        schedulers: Iterable[LRScheduler],
        *,
        without: Collection[int] = (),
        on_host: bool = False,
    ) -> None:
        copied = copied_to_host if on_host else _cloned
        self._modules = list(modules)
        tensors = {id(p): p for p in parameters}
        for module in self._modules:
            tensors |= {id(p): p for p in module.parameters() if id(p) not in without}
        self._parameters = [_Parameter(each, copied) for each in tensors.values()]
        self._buffers = _buffers_of(self._modules)
        self._modes = [(m, m.training) for module in self._modules for m in module.modules()]
        self._optimizers = [_Optimizer(each, copied) for each in optimizers]
        self._schedulers = [(each, copy.deepcopy(each.state_dict())) for each in schedulers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for parameter in self._parameters:
            parameter.put_back()
        for buffer in self._buffers:
            buffer.put_back()
        for module, mode in self._modes:
            module.training = mode
        for optimizer in self._optimizers:
            optimizer.put_back()
        for scheduler, scheduler_state in self._schedulers:
            scheduler.load_state_dict(scheduler_state)


Copied = Callable[[torch.Tensor], torch.Tensor]
"""Makes the copy of a local tensor that is kept."""


class _Parameter:
    """A parameter and its gradient as they were."""

    def __init__(self, parameter: torch.Tensor, copied: Copied) -> None:
        self._parameter = parameter
        self._content = copied(_local(parameter))
        gradient = parameter.grad
        self._gradient = None if gradient is None else copied(_local(gradient))
        self._spread = _spread_as(gradient) if isinstance(gradient, DTensor) else None

    def put_back(self) -> None:
        """Have both as they were."""
        local = _local(self._parameter)
        local.copy_(self._content)
        self._parameter.grad = None
        if self._gradient is None:
            return
        gradient = self._gradient.to(local.device, copy=True)
        if self._spread is not None:
            gradient = self._spread(gradient)
        self._parameter.grad = gradient


class _Optimizer:
    """An optimizer's hyperparameters and state as they were; every tensor stays the one it is."""

    def __init__(self, optimizer: Optimizer, copied: Copied) -> None:
        self._optimizer = optimizer
        self._groups = [
            {name: _kept(value, copied) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._state = [
            (parameter, state, _kept(state, copied)) for parameter, state in optimizer.state.items()
        ]

    def put_back(self) -> None:
        """Have both as they were."""
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - values.keys() - {"params"}:
                del group[name]  # some optimizers note there what their first step makes
            group.update({name: value() for name, value in values.items()})
        self._optimizer.state.clear()
        for parameter, state, kept in self._state:
            content = kept()
            if isinstance(state, dict):
                state.clear()
                state.update(content)
                content = state
            self._optimizer.state[parameter] = content


def _spread_as(tensor: DTensor) -> Callable[[torch.Tensor], DTensor]:
    """Return what makes a local tensor a part of one that is spread as this one is."""
    return partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _kept(value: Any, copied: Copied) -> Callable[[], Any]:
    """Keep a value, and return what makes it what it was."""
    if isinstance(value, torch.Tensor):
        content = copied(_local(value))

        def put_back() -> torch.Tensor:
            _local(value).copy_(content)
            return value

        return put_back
    if isinstance(value, dict):
        items = {key: _kept(item, copied) for key, item in value.items()}
        return lambda: {key: item() for key, item in items.items()}
    if isinstance(value, (list, tuple)):
        parts = [_kept(item, copied) for item in value]
        return lambda: type(value)(part() for part in parts)
    return lambda: value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
