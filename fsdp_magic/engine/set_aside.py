"""ENGINE: models and their optimizers set aside as they are, so that others may take their place.

What is set aside is nothing but kept: the same modules' classes, hooks and attributes, the same
parameters, the same state of the same optimizers, with the memory of all their tensors parked on
the host. So it is back exactly, bit for bit and object for object, whatever came in between; and
it needs no other rank, so it also comes back when the transports are broken.

Meanwhile the modules are the person's plain ones without parameters' memory, and ``plain`` gives
them whole parameters with the same content, once for each time they are spread anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_magic.engine.host_memory import ParkedStorages, WholeTensors
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.unspread import Shape, changes_of
from fsdp_magic.engine.world import World

Place = tuple[nn.Module, str]
Key = tuple[int, str, str]
"""Of a whole tensor: number of the model, dotted name of the parameter, "" or name of the state."""


class SetAside:
    """What is set aside on this rank.

    Args:
        models: the spread models.
        optimizers: every optimizer that names lead to.
        world: the ranks.
    """

    def __init__(
        self, models: Mapping[str, ShardedModel], optimizers: Iterable[Optimizer], world: World
    ) -> None:
        """Copy what is needed; nothing is changed yet.

        Collective: every rank must make its own.
        """
        self.models = dict(models)
        self._world = world
        for model in self.models.values():
            model.reshard()
        self._kept = [_KeptModel(model) for model in self.models.values()]
        self._optimizers = [_KeptOptimizer(each) for each in optimizers]
        self._keys = {
            id(parameter): (number, name)
            for number, kept in enumerate(self._kept)
            for name, parameter in kept.held.items()
        }
        self._whole = WholeTensors(dict(self._shapes()), world)
        for key, tensor in self._tensors():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._whole.is_writer:
                self._whole[key].copy_(whole.detach())
        torch.distributed.barrier()  # the first rank of each host has written
        self._extra = [
            (parameter, parameter.detach().clone())
            for kept in self._optimizers
            for parameter in kept.parameters
            if id(parameter) not in self._keys and not isinstance(parameter, DTensor)
        ]
        self._parked = ParkedStorages(map(_local, self._memory()))

    def take(self) -> None:
        """Take the models away: their modules are plain from here on."""
        for kept in self._kept:
            kept.model.leave()
            kept.changes.take_back()
            kept.note_plain()
        self._parked.empty()

    def plain(self) -> dict[str, nn.Module]:
        """Return the modules by name, with new whole parameters that the optimizers hold."""
        replaced: dict[int, nn.Parameter] = {}
        for number, kept in enumerate(self._kept):
            for name, parameter in kept.held.items():
                content = self._whole[number, name, ""]
                new = nn.Parameter(
                    torch.empty(content.shape, dtype=content.dtype, device=self._world.device),
                    requires_grad=parameter.requires_grad,
                )
                with torch.no_grad():
                    new.copy_(content)
                vars(new).update(kept.marks[name])
                replaced[id(parameter)] = new
                for module, attribute in kept.places[name]:
                    module._parameters[attribute] = new
        for optimizer in self._optimizers:
            optimizer.hold(replaced, self._whole_state)
        return {kept.model.name: kept.root for kept in self._kept}

    def forget_plain(self) -> None:
        """Drop whatever the modules have become, and what the optimizers hold of it."""
        for optimizer in self._optimizers:
            optimizer.let_go()
        for kept in self._kept:
            kept.plain.put_back()
        with torch.no_grad():
            for parameter, content in self._extra:
                parameter.copy_(content)

    def put_back(self) -> None:
        """Have everything as it was."""
        self.forget_plain()
        self._parked.fill()
        for kept in self._kept:
            kept.spread.put_back()
            kept.model.come_back()
        for optimizer in self._optimizers:
            optimizer.put_back()

    # -- what is kept of tensors

    def _tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield what must be whole: parameters of modules, and optimizer state like them."""
        for number, kept in enumerate(self._kept):
            for name, parameter in kept.of_modules.items():
                yield (number, name, ""), parameter
        for optimizer in self._optimizers:
            for held, state in optimizer.state.items():
                place = self._keys.get(id(held))
                if place is None:
                    continue
                alike = {w: v for w, v in state.items() if _is_like(v, held)}
                yield from (((*place, what), value) for what, value in alike.items())

    def _shapes(self) -> Iterator[tuple[Key, tuple[torch.Size, torch.dtype]]]:
        return ((key, (tensor.shape, tensor.dtype)) for key, tensor in self._tensors())

    def _memory(self) -> Iterator[torch.Tensor]:
        """Yield every tensor whose memory is free while the models are away."""
        for kept in self._kept:
            yield from (*kept.held.values(), *kept.of_modules.values())
            yield from (p.grad for p in kept.held.values() if p.grad is not None)
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if id(parameter) in self._keys:
                    yield from (v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim)

    def _whole_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of an optimizer's state of a parameter, whole."""
        place = self._keys.get(id(parameter))
        if place is None:
            return {what: _copied(value) for what, value in state.items()}
        return {
            what: self._whole[*place, what].to(self._world.device, copy=True)
            if _is_like(value, parameter)
            else _copied(value)
            for what, value in state.items()
        }


class _KeptModel:
    """A spread model as it is, and the plain one that its modules were before."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self.root = model.module
        self.changes = changes_of(self.root)
        modules = {id(m): m for m in (*self.root.modules(), *self.changes.modules)}
        self.spread = Shape(modules.values())
        self.plain = self.spread
        self.held = model.named_parameters()
        self.of_modules = dict(self.root.named_parameters())
        self.marks = {
            name: {k: v for k, v in vars(p).items() if k not in ("_local_tensor", "_spec")}
            for name, p in self.of_modules.items()
        }
        self.places: dict[str, list[Place]] = {name: [] for name in self.held}
        names = {id(parameter): name for name, parameter in self.of_modules.items()}
        for module in modules.values():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in names:
                    self.places[names[id(parameter)]].append((module, attribute))

    def note_plain(self) -> None:
        """Keep the modules as they are without what spreading changed."""
        self.plain = Shape({id(m): m for m in self.root.modules()}.values())


class _KeptOptimizer:
    """An optimizer as it is: its groups, their parameters, its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._rates = [
            (value, value.detach().clone())
            for group in optimizer.param_groups
            for value in group.values()
            if isinstance(value, torch.Tensor)
        ]
        self.parameters: list[torch.Tensor] = parameters_of(optimizer)
        self.state: dict[torch.Tensor, dict[str, Any]] = dict(optimizer.state)

    def hold(self, replaced: Mapping[int, nn.Parameter], state_of: Any) -> None:
        """Hold new parameters, with a copy of the state that belongs to them."""
        self._put_groups_back()
        for group in self._optimizer.param_groups:
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]
        self._optimizer.state.clear()
        for parameter, state in self.state.items():
            new = replaced.get(id(parameter), parameter)
            self._optimizer.state[new] = state_of(parameter, state)

    def let_go(self) -> None:
        """Hold nothing."""
        self._optimizer.state.clear()
        self._put_groups_back()

    def put_back(self) -> None:
        """Be what it was."""
        self.let_go()
        self._optimizer.state.update(self.state)

    def _put_groups_back(self) -> None:
        self._optimizer.param_groups[:] = [group for group, _ in self._groups]
        for group, kept in self._groups:
            group.clear()
            group.update(kept)
        for value, content in self._rates:
            value.copy_(content)


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value of an optimizer's state is cut as its parameter is."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
