"""ENGINE: ``zero1``: parameters and gradients whole on every rank, the optimizer's state in shards.

An optimizer holds shards: of each parameter the rows that this rank updates, the same as under
``full_shard``. A shard is no copy: its rows are those of the whole parameter, and its gradient's
rows those of the whole gradient. So an optimizer keeps state for its rows only and writes into the
whole parameter; after its step the rows of the other ranks are gathered into place. What cannot be
cut, a scalar, optimizers hold whole.

Gradients can be cleared through the module, which knows the whole ones, and through an optimizer,
which knows the shards'. Whichever is cleared, the other is too (``shard_views.py``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.optimizers import parameters_of, repoint
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.ddp import compute_as_asked, make_alike
from fsdp_magic.engine.parallel.row_gathering import gather_rows
from fsdp_magic.engine.parallel.shard_views import ShardViews, has_rows
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.whole_model import WholeModel
from fsdp_magic.engine.parallel.whole_models import living
from fsdp_magic.engine.parallel.wrapping import Units
from fsdp_magic.engine.world import World


class Zero1Model(WholeModel):
    """A model that every rank holds whole, while optimizers hold shards of it.

    Collective: every rank must make its own.

    Args:
        module: its root, with the same values on every rank.
        name: what it was bound to.
        spec: how it is spread.
        world: over whom.
    """

    def __init__(self, module: nn.Module, *, name: str, spec: ModelSpec, world: World) -> None:
        self._views = ShardViews(world)
        self._stepped: set[int] = set()
        super().__init__(module, name=name, spec=spec, world=world)
        _watch_optimizers()
        torch_private.read_scalars_whole()

    def _watch(self, parameter: nn.Parameter) -> None:
        """Have every gradient of a parameter noted, before and after it is added."""
        super()._watch(parameter)
        before = functools.partial(_before_gradient, weakref.ref(self), weakref.ref(parameter))
        parameter.register_hook(before)  # type: ignore[no-untyped-call]

    # -- where parameters live

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters as optimizers must hold them, by dotted name."""
        return {name: self._views.shard_of(p) for name, p in self.module.named_parameters()}

    def in_place_of_gathered(self) -> dict[int, nn.Parameter]:
        """Return the shard by the id of the whole parameter."""
        return {
            id(p): shard
            for p in self.module.parameters()
            if (shard := self._views.shard_of(p)) is not p
        }

    def held(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what an optimizer holds for a parameter of the module."""
        return self._views.held(parameter)

    def cut(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each parameter that an optimizer holds a shard of, with the shard."""
        for parameter in self.module.parameters():
            shard = self._views.held(parameter)
            if shard is not parameter:
                yield parameter, shard

    # -- gradients

    def reduce(self) -> None:
        """Make gradients those of all ranks, and give each shard its rows of them.

        Collective: every rank must call this, after a backward.
        """
        if not self._adds_up:  # there shards may have been cleared, and the whole must be too
            for parameter, shard in self.cut():
                self._views.gradient_of(parameter, shard)
        super().reduce()
        for parameter, shard in self.cut():
            self._views.link(parameter, shard)
            if self._adds_up:
                parameter.grad = None  # its memory is the shard's now, and goes when that does

    def clear_gradients(self) -> None:
        """Drop every gradient."""
        super().clear_gradients()
        for parameter in self.module.parameters():
            parameter.grad = None

    def forget_iteration(self) -> None:
        """Forget a forward or backward that an exception ended."""
        super().forget_iteration()
        for parameter, shard in self.cut():
            self._views.link(parameter, shard)

    def before_gradient(self, parameter: nn.Parameter) -> None:
        """Clear a gradient that was cleared through its shard, before another is added to it."""
        if parameter.grad is not None and not self._adds_up:
            self._views.gradient_of(parameter, self.held(parameter))

    # -- steps

    def before_step(self, optimizer: Optimizer) -> None:
        """Have an optimizer hold shards, with their gradients."""
        if self._adds_up:
            return
        if not isinstance(optimizer, LBFGS):  # it keeps the whole history, whatever it holds
            held = {id(p) for p in parameters_of(optimizer)}
            whole = [p for p in self.module.parameters() if id(p) in held]
            repoint(optimizer, {id(p): self._views.shard_of(p) for p in whole})
        held = {id(p) for p in parameters_of(optimizer)}
        for parameter, shard in self.cut():
            if id(shard) in held:
                self._views.link(parameter, shard)

    def after_step(self, optimizer: Optimizer) -> None:
        """Gather what an optimizer has updated; in an automatic step once all have stepped.

        Collective: every rank must call this.
        """
        self._stepped.update(id(p) for p in parameters_of(optimizer))
        if not self._adds_up:
            self.updated()

    def updated(self) -> None:
        """Bring the rows that other ranks have updated into the whole parameters.

        Collective: every rank must call this.
        """
        self._gather(p for p, shard in self.cut() if id(shard) in self._stepped)

    @property
    def is_torn(self) -> bool:
        """Whether this rank has updated rows that it may not have gathered."""
        return bool(self._stepped)

    def gather_all(self) -> None:
        """Bring every rank's rows into the whole parameters.

        Collective: every rank must call this.
        """
        self._gather(p for p in self.module.parameters() if has_rows(p))

    def _gather(self, parameters: Iterable[nn.Parameter]) -> None:
        gather_rows(list(parameters), name=self.name, group=self._group, world=self._world)
        self._stepped.clear()


def replicate_with_sharded_state(
    module: nn.Module, *, name: str, spec: ModelSpec, world: World, units: Units
) -> tuple[Zero1Model, dict[int, nn.Parameter]]:
    """Spread a model over the ranks, in place: each has all of it and a part of the state.

    Collective: every rank must call this.

    Args:
        module: the model; the same on every rank, or rank 0's is taken.
        name: what it is bound to.
        spec: how.
        world: over whom.
        units: what is cast together, if it computes in low precision.

    Returns:
        The spread model, and each shard by the id of its parameter.
    """
    notes = make_alike(module, name=name, world=world)
    compute_as_asked(module, spec, units)
    for parameter in module.parameters():
        if not parameter.is_contiguous():  # its rows could not be gathered into place
            parameter.data = parameter.data.contiguous()
    model = Zero1Model(module, name=name, spec=spec, world=world)
    model.notes += notes
    return model, model.in_place_of_gathered()


def complete_updates(models: Iterable[ShardedModel], world: World) -> None:
    """Gather what ranks have updated when a failure kept some of them from gathering it.

    Collective: every rank must call this.
    """
    ours = {model.name: model for model in models if isinstance(model, Zero1Model)}
    said: list[dict[str, bool]] = [{}] * world.world_size
    dist.all_gather_object(said, {name: model.is_torn for name, model in ours.items()})
    for name, model in ours.items():
        if all(name in each for each in said) and any(each[name] for each in said):
            model.gather_all()


def gather_stepped(optimizer: Optimizer) -> None:
    """Gather what an optimizer has updated so far.

    Collective: every rank must call this.
    """
    _after_step(optimizer)


def _before_gradient(
    model: weakref.ref[Zero1Model], parameter: weakref.ref[nn.Parameter], _: torch.Tensor
) -> None:
    alive, whole = model(), parameter()
    if alive is not None and whole is not None:
        alive.before_gradient(whole)


@functools.cache
def _watch_optimizers() -> None:
    """Have every optimizer of this process tell before and after its steps."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    zero_grad = Optimizer.zero_grad

    @functools.wraps(zero_grad)
    def both(self: Optimizer, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        _clear_whole(self, set_to_none=set_to_none)

    Optimizer.zero_grad = both  # type: ignore[method-assign]


def _concerned(optimizer: Optimizer) -> Iterator[Zero1Model]:
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    for model in living():
        if isinstance(model, Zero1Model) and model.alive:
            both = (id(each) for p in model.module.parameters() for each in (p, model.held(p)))
            if not held.isdisjoint(both):
                yield model


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for model in _concerned(optimizer):
        model.before_step(optimizer)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    for model in _concerned(optimizer):
        model.after_step(optimizer)


def _clear_whole(optimizer: Optimizer, *, set_to_none: bool) -> None:
    """Clear the whole gradients of which an optimizer has cleared the rows."""
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    for model in _concerned(optimizer):
        for parameter, shard in model.cut():
            if id(shard) not in held or parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()
