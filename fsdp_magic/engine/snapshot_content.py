"""ENGINE: what a snapshot holds of this rank, and putting it back.

What training changes is found by name: sharded models and other modules (parameters, buffers,
modes), optimizers (state, groups, and parameters that no module has), schedulers. So a snapshot
can be put back into the same objects, and into those that the same cells build on a new engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_magic.engine import modeling
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.position import Place
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.snapshot_files import SnapshotReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a tensor stood in what was packed.

    Attributes:
        index: of this rank's part of it among the tensors.
        shape: of the whole, if it was sharded.
        stride: of the whole.
        on_host: whether it was on the CPU.
    """

    index: int
    shape: torch.Size | None
    stride: tuple[int, ...]
    on_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleContent:
    """A module: tensors by name, and the modes of its parts."""

    parameters: dict[str, Slot]
    buffers: dict[str, Slot]
    modes: dict[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerContent:
    """An optimizer: its groups without parameters, its state and its own parameters by place."""

    sizes: tuple[int, ...]
    groups: list[dict[str, Any]]
    state: dict[int, Any]
    own: dict[int, Slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A snapshot.

    Attributes:
        step: steps of training done.
        epoch: of the newest.
        run_id, epochs_ended: of the run that it was made in.
        training, process: random states.
        places: where the next step begins in the data, by what ``--data`` named.
        sequential: those of them that are read in their own order.
    """

    step: int
    epoch: int
    run_id: int
    epochs_ended: int
    training: dict[str, Any]
    process: dict[str, Any]
    places: dict[str, Place]
    sequential: tuple[str, ...]
    models: dict[str, ModuleContent] = field(default_factory=dict)
    modules: dict[str, ModuleContent] = field(default_factory=dict)
    optimizers: dict[str, OptimizerContent] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """What training changes on this rank, by name."""

    models: dict[str, nn.Module]
    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, LRScheduler]


def subjects_of(namespace: Mapping[str, Any], models: modeling.Models) -> Subjects:
    """Return what names lead to, not what was replaced and only lives on."""
    names = modeling.bound_names(models, namespace)
    sharded = {name: models[name].module for name in names}
    ours = {id(module) for module in sharded.values()}
    found = reachable(namespace, nn.Module)
    return Subjects(
        models=sharded,
        modules={name: module for name, module in found.items() if id(module) not in ours},
        optimizers=reachable(namespace, Optimizer),
        schedulers=reachable(namespace, LRScheduler),
    )


class Packer:
    """Takes things apart into tensors and what can be pickled.

    Attributes:
        tensors: this rank's part of each, not copied.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._packed: set[int] = set()

    def pack(self, value: Any) -> Any:
        """Return a value with slots in the place of tensors."""
        if isinstance(value, torch.Tensor):
            return self._slot(value)
        if type(value) is dict:
            return {key: self.pack(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.pack(item) for item in value)
        return value

    def module(self, module: nn.Module) -> ModuleContent:
        """Return a module's content, without tensors that were packed before."""
        named = dict(module.named_parameters()), dict(module.named_buffers())
        parameters, buffers = (
            {name: self._slot(tensor) for name, tensor in each.items() if self._is_new(tensor)}
            for each in named
        )
        modes = {name: part.training for name, part in module.named_modules()}
        return ModuleContent(parameters=parameters, buffers=buffers, modes=modes)

    def optimizer(self, optimizer: Optimizer) -> OptimizerContent:
        """Return an optimizer's content; its parameters where nothing else had them."""
        parameters = parameters_of(optimizer)
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        groups = [
            {name: self.pack(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        state = {
            place[id(key)]: self.pack(value)
            for key, value in optimizer.state.items()
            if id(key) in place
        }
        own = {i: self._slot(p) for i, p in enumerate(parameters) if self._is_new(p)}
        sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
        return OptimizerContent(sizes=sizes, groups=groups, state=state, own=own)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        new = id(tensor) not in self._packed
        self._packed.add(id(tensor))
        return new

    def _slot(self, tensor: torch.Tensor) -> Slot:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        self.tensors.append(local)
        return Slot(
            index=len(self.tensors) - 1,
            shape=tensor.shape if isinstance(tensor, DTensor) else None,
            stride=tensor.stride(),
            on_host=tensor.device.type == "cpu",
        )


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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _described(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
