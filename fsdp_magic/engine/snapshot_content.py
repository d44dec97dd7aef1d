"""ENGINE: what a snapshot holds of this rank; ``snapshot_unpacking.py`` puts it back.

What training changes is found by name: sharded models and other modules (parameters, buffers,
modes), optimizers (state, groups, and parameters that no module has), schedulers. So a snapshot
can be put back into the same objects, and into those that the same cells build on a new engine.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """An optimizer: its groups without parameters, its state and its own parameters by place.

    Attributes:
        kind: its class.
        defaults: the hyperparameters that it was made with.
        sizes: how many parameters each group holds.
        shapes: of all its parameters.
        groups: hyperparameters of each.
        state, own: by place among the parameters.
    """

    kind: str
    defaults: dict[str, Any]
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    groups: list[dict[str, Any]]
    state: dict[int, Any]
    own: dict[int, Slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContent:
    """A scheduler: its class, and its state."""

    kind: str
    state: dict[str, Any]


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
        scaler: of fp16.
    """

    step: int
    epoch: int
    run_id: int
    epochs_ended: int
    training: dict[str, Any]
    process: dict[str, Any]
    scaler: dict[str, Any]
    places: dict[str, Place]
    sequential: tuple[str, ...]
    models: dict[str, ModuleContent] = field(default_factory=dict)
    modules: dict[str, ModuleContent] = field(default_factory=dict)
    optimizers: dict[str, OptimizerContent] = field(default_factory=dict)
    schedulers: dict[str, SchedulerContent] = field(default_factory=dict)


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
        own = {i: self._slot(p) for i, p in enumerate(parameters) if self._is_own(p)}
        sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
        return OptimizerContent(
            kind=kind_of(optimizer),
            defaults=self.pack(dict(optimizer.defaults)),
            sizes=sizes,
            shapes=tuple(tuple(parameter.shape) for parameter in parameters),
            groups=groups,
            state=state,
            own=own,
        )

    def scheduler(self, scheduler: LRScheduler) -> SchedulerContent:
        """Return a scheduler's content."""
        return SchedulerContent(kind=kind_of(scheduler), state=self.pack(scheduler.state_dict()))

    def _is_own(self, parameter: torch.Tensor) -> bool:
        """Return whether neither a parameter nor what it is a part of (``zero1``) was packed."""
        stored = _local(parameter).untyped_storage().data_ptr()
        packed = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
        return self._is_new(parameter) and not (stored and stored in packed)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        new = id(tensor) not in self._packed
        self._packed.add(id(tensor))
        return new

    def _slot(self, tensor: torch.Tensor) -> Slot:
        self.tensors.append(_local(tensor))
        return Slot(
            index=len(self.tensors) - 1,
            shape=tensor.shape if isinstance(tensor, DTensor) else None,
            stride=tensor.stride(),
            on_host=tensor.device.type == "cpu",
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def kind_of(value: object) -> str:
    """Return the class of an optimizer or a scheduler, as another engine can compare it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
