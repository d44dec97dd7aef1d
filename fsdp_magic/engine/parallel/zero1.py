"""ENGINE: ``zero1``: parameters and gradients whole on every rank, the optimizer's state in shards.

An optimizer holds shards: of each parameter the rows that this rank updates, the same as under
``full_shard``. A shard is no copy: its rows are those of the whole parameter, and its gradient's
rows those of the whole gradient. So an optimizer keeps state for its rows only and writes into the
whole parameter; after its step the rows of the other ranks are gathered into place. What cannot be
cut, a scalar, optimizers hold whole.

Gradients can be cleared through the module, which knows the whole ones, and through an optimizer,
which knows the shards'. Whichever is cleared, the other is too (``shard_views.py``). Other writes
through shards reach this rank's rows only: to parameters, they are gathered before the next
forward; to gradients, they are refused where the whole ones are needed after them, and a
``GradScaler`` is shown the whole ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.optimizers import parameters_of, repoint
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.casting import compute_in
from fsdp_magic.engine.parallel.ddp import make_alike
from fsdp_magic.engine.parallel.precision import compute_dtype
from fsdp_magic.engine.parallel.row_gathering import gather_rows
from fsdp_magic.engine.parallel.shard_views import ShardViews, has_rows
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.whole_model import WholeModel
from fsdp_magic.engine.parallel.whole_models import living
from fsdp_magic.engine.parallel.wrapping import Units
from fsdp_magic.engine.parallel.zero1_optimizers import watch_optimizers
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
        self._untouched: set[int] = set()
        """Ids of the shards that are stepped now and whose gradients nothing wrote before."""
        super().__init__(module, name=name, spec=spec, world=world)
        watch_optimizers(_concerned)
        module.register_forward_pre_hook(_before_forward)
        torch_private.read_scalars_whole()
        torch_private.step_on_own_parts()

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
        for parameter in self._parameters():
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
            elif not self._views.wrote_gradient(parameter, shard):
                self._views.settle_gradient(parameter, shard)

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
        if parameter.grad is None or self._adds_up:
            return
        shard = self.held(parameter)
        self._views.gradient_of(parameter, shard)
        if shard is not parameter and self._views.wrote_gradient(parameter, shard):
            if parameter.grad is not None and parameter.grad.any():
                raise self._refusal(parameter, "backward would add to all of it")
            self._views.settle_gradient(parameter, shard)  # zeros are the same on every rank

    def shows_whole(self, parameter: nn.Parameter, shard: nn.Parameter) -> bool:
        """Return whether a whole gradient may be changed in the place of its shard's."""
        gradient = self._views.gradient_of(parameter, shard)
        return gradient is not None and not self._views.wrote_gradient(parameter, shard)

    def cleared(self, parameter: nn.Parameter, shard: nn.Parameter) -> None:
        """Note that both gradients of a parameter were set to zero."""
        self._views.settle_gradient(parameter, shard)

    def _refusal(self, parameter: nn.Parameter, so: str) -> FsdpError:
        return FsdpError(
            f"the gradient of `{self._name_of(parameter)}` was changed through an optimizer, which "
            f"holds only this rank's rows of it under zero1, and {so}; change gradients through "
            f"the model instead, as in: for p in {self.name}.parameters(): p.grad.mul_(0.5)"
        )

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
        self._untouched.clear()
        for parameter, shard in self.cut():
            if id(shard) in held:
                self._views.link(parameter, shard)
                if not self._views.wrote_gradient(parameter, shard):
                    self._untouched.add(id(shard))
                elif self._views.wrote_both_gradients(parameter, shard):
                    STEPS.refused(optimizer)  # it was counted before we were asked
                    raise self._refusal(parameter, "then as a whole, through the model")

    def after_step(self, optimizer: Optimizer) -> None:
        """Gather what an optimizer has updated; in an automatic step once all have stepped.

        Collective: every rank must call this.
        """
        self._stepped.update(id(p) for p in parameters_of(optimizer))
        if self._adds_up:
            return
        for parameter, shard in self.cut():
            if id(shard) in self._untouched:  # what an optimizer does with its gradients is its own
                self._views.settle_gradient(parameter, shard)
        self.updated()

    def updated(self) -> None:
        """Bring the rows that other ranks have updated into the whole parameters.

        Collective: every rank must call this.
        """
        self._gather(p for p, shard in self.cut() if id(shard) in self._stepped)

    def gather_written(self) -> None:
        """Gather what was written through shards since they were gathered, if anything was.

        Collective if so: every rank must have written to the same.
        """
        if written := self._written():
            self._gather(written)

    def _written(self) -> list[nn.Parameter]:
        return [p for p, shard in self.cut() if self._views.wrote(p, shard)]

    @property
    def is_torn(self) -> bool:
        """Whether this rank has updated rows that it may not have gathered."""
        return bool(self._stepped or self._written())

    def gather_all(self) -> None:
        """Bring every rank's rows into the whole parameters.

        Collective: every rank must call this.
        """
        self._gather(p for p in self.module.parameters() if has_rows(p))

    def _gather(self, parameters: Iterable[nn.Parameter]) -> None:
        gathered = list(parameters)
        gather_rows(gathered, name=self.name, group=self.group, world=self._world)
        self._stepped.clear()
        for parameter in gathered:
            if (shard := self.held(parameter)) is not parameter:
                self._views.gathered(parameter, shard)


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
    if (dtype := compute_dtype(spec)) is not None:
        compute_in(module, units, dtype)
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


def gather_written(models: Iterable[ShardedModel]) -> None:
    """Gather what a cell has written through optimizers' shards.

    Collective if it has: every rank must call this.
    """
    for model in models:
        if isinstance(model, Zero1Model):
            model.gather_written()


def gather_stepped(optimizer: Optimizer) -> None:
    """Gather what an optimizer has updated so far.

    Collective: every rank must call this.
    """
    for model in _concerned(optimizer):
        model.after_step(optimizer)


def _before_gradient(
    model: weakref.ref[Zero1Model], parameter: weakref.ref[nn.Parameter], _: torch.Tensor
) -> None:
    alive, whole = model(), parameter()
    if alive is not None and whole is not None:
        alive.before_gradient(whole)


def _before_forward(module: nn.Module, _: object) -> None:
    """Gather what was written through shards; a copy of the module has none."""
    if torch.compiler.is_compiling():
        return
    gather_written(model for model in living() if model.reference() is module)


def _concerned(optimizer: Optimizer) -> Iterator[Zero1Model]:
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    for model in living():
        if isinstance(model, Zero1Model) and model.alive:
            both = (id(each) for p in model.module.parameters() for each in (p, model.held(p)))
            if not held.isdisjoint(both):
                yield model
