"""ENGINE: putting what a snapshot holds of this rank back into modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.snapshot_content import ModuleContent, OptimizerContent, Slot
from fsdp_magic.engine.snapshot_files import SnapshotReader


class Unpacker:
    """Puts things together again.

    Args:
        reader: of the file they are in.
        device: where tensors go that were not on the CPU.
    """

    def __init__(self, reader: SnapshotReader, device: torch.device) -> None:
        self._reader = reader
        self._device = device

    def difference(self, name: str, module: nn.Module, content: ModuleContent) -> str:
        """Return in what a module is unlike the one that was kept; nothing: in nothing."""
        present = dict(module.named_parameters())
        missing = [n for n in content.parameters if n not in present]
        more = [n for n in present if n not in content.parameters]
        if missing or more:
            which = f"has no {missing[0]}" if missing else f"has {more[0]}, which that one has not"
            return f"{name} {which}"
        for parameter, slot in content.parameters.items():
            tensor, entry = present[parameter], self._reader.entries[slot.index]
            shape = tuple(slot.shape or entry.shape)
            if tuple(tensor.shape) != shape or tensor.dtype != entry.dtype:
                return (
                    f"{name}.{parameter} is {_described(tensor.shape, tensor.dtype)}, and "
                    f"{_described(shape, entry.dtype)} there"
                )
            if tuple(_local(tensor).shape) != entry.shape:
                return f"{name}.{parameter} was spread over the ranks in another way"
        return ""

    def unpack(self, value: Any, *, like: torch.Tensor | None = None) -> Any:
        """Return what was packed; what was sharded is sharded as ``like`` is."""
        if isinstance(value, Slot):
            return self._made(value, like)
        if type(value) is dict:
            return {key: self.unpack(item, like=like) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.unpack(item, like=like) for item in value)
        return value

    @torch.no_grad()
    def module(self, module: nn.Module, content: ModuleContent) -> None:
        """Put a module back; what it has no more is left out."""
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        for name, slot in content.parameters.items():
            if name in parameters and self._fits(parameters[name], slot):
                self._into(parameters[name], slot)
                parameters[name].grad = None
        for name, slot in content.buffers.items():
            if name in buffers and self._fits(buffers[name], slot):
                self._into(buffers[name], slot)
            else:
                path, _, own = name.rpartition(".")
                module.get_submodule(path)._buffers[own] = self._made(slot, None)
        for name, part in module.named_modules():
            part.training = content.modes.get(name, part.training)

    @torch.no_grad()
    def optimizer(self, optimizer: Optimizer, content: OptimizerContent) -> None:
        """Put an optimizer back, of which ``is_like`` holds."""
        parameters = parameters_of(optimizer)
        self.groups(optimizer, content)
        optimizer.state.clear()
        for index, state in content.state.items():
            optimizer.state[parameters[index]] = self.unpack(state, like=parameters[index])
        self.own_parameters(optimizer, content)

    @torch.no_grad()
    def own_parameters(self, optimizer: Optimizer, content: OptimizerContent) -> None:
        """Put back the parameters that no module has."""
        parameters = parameters_of(optimizer)
        for index, slot in content.own.items():
            self._into(parameters[index], slot)
            parameters[index].grad = None

    @torch.no_grad()
    def groups(self, optimizer: Optimizer, content: OptimizerContent) -> None:
        """Put the hyperparameters back; a learning rate held in a tensor stays that tensor."""
        for group, kept in zip(optimizer.param_groups, content.groups, strict=True):
            for name, value in kept.items():
                if isinstance(value, Slot) and isinstance(group.get(name), torch.Tensor):
                    self._into(group[name], value)
                else:
                    group[name] = self.unpack(value)

    def is_like(self, optimizer: Optimizer, content: OptimizerContent) -> bool:
        """Return whether an optimizer holds parameters as the one that was kept."""
        if tuple(len(group["params"]) for group in optimizer.param_groups) != content.sizes:
            return False
        parameters = parameters_of(optimizer)
        if tuple(tuple(parameter.shape) for parameter in parameters) != content.shapes:
            return False
        if any(_is_cut_unlike(parameters[i], state) for i, state in content.state.items()):
            return False
        return all(self._fits(parameters[i], slot) for i, slot in content.own.items())

    def _fits(self, tensor: torch.Tensor, slot: Slot) -> bool:
        entry = self._reader.entries[slot.index]
        return tuple(_local(tensor).shape) == entry.shape and tensor.dtype == entry.dtype

    def _into(self, tensor: torch.Tensor, slot: Slot) -> None:
        _local(tensor).copy_(self._reader.tensor(slot.index))

    def _made(self, slot: Slot, like: torch.Tensor | None) -> torch.Tensor:
        tensor = self._reader.tensor(slot.index)
        if not slot.on_host:
            tensor = tensor.to(self._device)
        if slot.shape is None or not isinstance(like, DTensor):
            return tensor
        return DTensor.from_local(
            tensor,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=slot.shape,
            stride=slot.stride,
        )


def _is_cut_unlike(parameter: torch.Tensor, state: Any) -> bool:
    """Return whether state of a shard was kept and the parameter is whole now."""
    slots = state.values() if isinstance(state, dict) else ()
    cut = any(isinstance(slot, Slot) and slot.shape is not None for slot in slots)
    return cut and not isinstance(parameter, DTensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _described(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
