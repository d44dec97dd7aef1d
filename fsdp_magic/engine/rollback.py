"""ENGINE: what a trial run puts back: everything that training changes.

A snapshot is a copy of this rank's part: shards, buffers, optimizer and scheduler state. It is
taken in memory on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Snapshot:
    """What training changes, as it was when this was made.

    Args:
        modules: whose parameters, buffers and modes are kept.
        parameters: trained ones beside those of the modules.
        optimizers: whose state and hyperparameters are kept.
        schedulers: whose state is kept.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Iterable[torch.Tensor],
        optimizers: Iterable[Optimizer],
        schedulers: Iterable[LRScheduler],
    ) -> None:
        self._modules = list(modules)
        tensors = {id(p): p for p in parameters}
        for module in self._modules:
            tensors |= {id(p): p for p in module.parameters()}
        self._parameters = [(tensor, _copy(tensor)) for tensor in tensors.values()]
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for module in self._modules
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._modes = [(m, m.training) for module in self._modules for m in module.modules()]
        self._optimizers = [(each, _state_of(each)) for each in optimizers]
        self._schedulers = [(each, copy.deepcopy(each.state_dict())) for each in schedulers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for tensor, kept in self._parameters:
            _local(tensor).copy_(kept)
            tensor.grad = None
        for owner, name, buffer, kept in self._buffers:
            owner._buffers[name] = buffer  # the cell may have bound another one
            buffer.copy_(kept)
        for module, mode in self._modes:
            module.training = mode
        for optimizer, (groups, state) in self._optimizers:
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _put_back(group, values)
            optimizer.state.clear()
            optimizer.state.update(state)
        for scheduler, scheduler_state in self._schedulers:
            scheduler.load_state_dict(scheduler_state)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return _local(tensor).detach().clone()


def _state_of(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return copies of an optimizer's hyperparameters and state, keyed by its own parameters."""
    groups = [
        {name: _copied(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return groups, {key: _copied(value) for key, value in optimizer.state.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


def _put_back(group: dict[str, Any], kept: dict[str, Any]) -> None:
    """Put a group's hyperparameters back; a learning rate held in a tensor stays that tensor."""
    for name, value in kept.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
            group[name].copy_(value)
        else:
            group[name] = value
