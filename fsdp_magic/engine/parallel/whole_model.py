"""ENGINE: a model that every rank holds whole: its gradients are reduced, its parameters stay.

A hook on each parameter notes that its gradient is there. What happens then depends on who asked
for the backward. Within an automatic step gradients stay on this rank until the last backward,
and are reduced while that runs, as they arrive (``gradient_buckets.py``). Within a manual step
they are averaged once all ranks have agreed that the backward succeeded; anywhere else at the end
of it. An earlier backward left the same on every rank, and the mean of that is that.

The module, its class and its parameters stay the person's: nothing wraps them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.placement import Placement
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel.gradient_buckets import GradientReduction, buckets_of
from fsdp_magic.engine.parallel.own_gradients import ReducedGradients, watch_steps
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.unreduced_gradients import UnreducedGradients
from fsdp_magic.engine.parallel.whole_models import (
    forget,
    living,
    reduce_after_backward,
    remember,
    replicated,
    requiring_gradient,
)
from fsdp_magic.engine.world import World


class WholeModel(ShardedModel):
    """A model that every rank holds whole.

    Collective: every rank must make its own.

    Args:
        module: its root, with the same values on every rank.
        name: what it was bound to.
        spec: how it is spread.
        world: over whom.

    Attributes:
        group: the ranks; for gradients only.
    """

    def __init__(self, module: nn.Module, *, name: str, spec: ModelSpec, world: World) -> None:
        super().__init__(module, name=name, spec=spec, world=world)
        self.group = world.gradients_group()
        self._reduced = ReducedGradients()
        self._trained: Collection[int] = ()
        self._unreduced = UnreducedGradients(self.group)
        self._adds_up = self._within_step = False
        self._listed: list[nn.Parameter] | None = None
        """The parameters, while a run adds gradients up: walking through modules takes long."""
        self._arrived: dict[int, None] = {}
        self._arriving_late: set[int] = set()
        self._order: list[int] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._reduction: GradientReduction | None = None
        remember(self)
        watch_steps()
        for parameter in module.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                with requiring_gradient(parameter):  # one that is frozen may be trained later
                    self._watch(parameter)
        if spec.accumulate_sync == "every":
            self.notes.append(
                f"--accumulate-sync every changes nothing under {spec.strategy}: gradients are "
                "whole on every rank, so they are reduced once a step"
            )

    def _watch(self, parameter: nn.Parameter) -> None:
        """Have every gradient of a parameter noted."""
        note = functools.partial(_note, weakref.ref(self))
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Count no longer among the models that are held whole."""
        forget(self)

    def come_back(self) -> None:
        """Count among them again."""
        remember(self)

    # -- where parameters live

    def placement(self) -> Placement:
        """Return where every parameter lives; the same on every rank, without communication."""
        named = self.module.named_parameters()
        return self.placed(replicated(n, p, ranks=self._world.world_size) for n, p in named)

    def reshard(self) -> None:
        """Do nothing: parameters are always whole."""

    def settle(self, trained: Collection[int]) -> None:
        """Note, as a run begins, what of it is trained.

        Args:
            trained: ids of the parameters that optimizers hold.
        """
        self._trained = frozenset(trained)
        self._arriving_late.clear()
        self._order, self._buckets = [], []

    def held(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what an optimizer holds for a parameter of the module."""
        return parameter

    def _parameters(self) -> Iterable[nn.Parameter]:
        return self.module.parameters() if self._listed is None else self._listed

    def _trained_parameters(self) -> list[nn.Parameter]:
        return [p for p in self._parameters() if id(self.held(p)) in self._trained]

    # -- gradients

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Add gradients up over the ranks inside, where they would be averaged."""
        self._adds_up, self._listed = True, list(self.module.parameters())
        for parameter in self._trained_parameters():
            parameter.grad = None
        try:
            yield
        finally:
            self._adds_up, self._listed, self._buckets = False, None, []
            self.forget_iteration()  # nothing is left of a run but what an exception ended

    @contextmanager
    def reducing(self, *, is_last: bool) -> Iterator[None]:
        """Have one backward of a step inside.

        Args:
            is_last: whether it is the last one.
        """
        self._arrived.clear()
        self._within_step = True
        if is_last and self._adds_up and self._order and _is_trained_alone(self):
            self._reduction = self._new_reduction()
        try:
            yield
        finally:
            self._within_step = False

    def reduce(self) -> None:
        """Make gradients those of all ranks.

        Collective: every rank must call this, after a backward. Where gradients are added up,
        those that are missing here and not on another rank are zeros by now.
        """
        if self._adds_up:
            reduction = self._reduction or self._new_reduction()
            self._reduction = None
            reduction.finish()
            self._unreduced.clear()
            self._settle_order()
        else:
            parameters = list(self.module.parameters())
            self._reduced.note(self._unreduced.average(parameters, name=self.name))

    def reduced_here(self) -> set[int]:
        """Return the ids of whole parameters whose gradients ``reduce`` takes care of."""
        return {id(parameter) for parameter in self.module.parameters()}

    def fill_missing(self, used: Collection[int]) -> None:
        """Have zeros as the gradients of parameters that only other ranks used.

        Args:
            used: ids of the parameters, as optimizers hold them, that some rank used.
        """
        for parameter in self.module.parameters():
            if parameter.grad is None and id(self.held(parameter)) in used:
                parameter.grad = torch.zeros_like(parameter)

    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that gradients of a backward arrive at."""
        return (p for p in self.module.parameters() if p.requires_grad)

    def updated(self) -> None:
        """Do nothing: every rank has updated its own."""

    def forget_iteration(self) -> None:
        """Forget a forward or backward that an exception ended.

        What was on its way is never waited for: its transport is gone.
        """
        self._reduction = None
        self._within_step = False
        self._unreduced.drop(self.module.parameters())

    def unsynced(self, parameters: Collection[int]) -> AbstractContextManager[None]:
        """Leave the gradients of parameters on this rank inside.

        Args:
            parameters: their ids.
        """
        return self._unreduced.unsynced(parameters)

    def note(self, parameter: nn.Parameter) -> None:
        """Note that a gradient has arrived, and reduce it when it is time."""
        number = id(parameter)
        self.used.add(id(self.held(parameter)))
        self._unreduced.note(parameter)
        if not self._within_step:
            if self._unreduced.is_synced(parameter):
                reduce_after_backward(self)
        elif number in self._arrived:
            self._note_again(parameter)
        else:
            self._arrived[number] = None
            if self._reduction is not None and number not in self._arriving_late:
                self._reduction.arrived(parameter)

    def _note_again(self, parameter: nn.Parameter) -> None:
        # a reentrant checkpoint goes backward within the backward
        self._arriving_late.add(id(parameter))
        if self._reduction is not None and self._reduction.is_launched(parameter):
            raise FsdpError(
                f"`{self._name_of(parameter)}` got one more gradient when the first was on its way "
                "to the other ranks, as a reentrant checkpoint does; type: "
                "checkpoint(..., use_reentrant=False)"
            )

    def _new_reduction(self) -> GradientReduction:
        if not self._buckets:
            parameters = self._trained_parameters()
            expected = [parameters[n] for n in self._order] or parameters[::-1]
            self._buckets = buckets_of(expected)
        return GradientReduction(self._buckets, name=self.name, group=self.group)

    def _settle_order(self) -> None:
        """Expect gradients in the order in which rank 0 got them in the first step of a run.

        What it did not get, or got twice, comes last, so that nothing waits for it.

        Collective: every rank must call this.
        """
        if self._order or not (parameters := self._trained_parameters()):
            return
        arrived = [n for n in self._arrived if n not in self._arriving_late]
        place = {number: place for place, number in enumerate(arrived)}
        places = [place.get(id(parameter), len(place)) for parameter in parameters]
        order = torch.tensor(sorted(range(len(places)), key=places.__getitem__))
        dist.broadcast(order, group_src=0, group=self.group)
        self._order, self._buckets = order.tolist(), []

    def own_gradients(self, held: Collection[int]) -> list[torch.Tensor]:
        """Return the gradients of which nothing says that all ranks have the same.

        Args:
            held: ids of the parameters that an optimizer holds.
        """
        if self._adds_up:
            return []
        parameters = (
            p
            for p in self.module.parameters()
            if (id(p) in held or id(self.held(p)) in held) and p not in self._unreduced
        )
        return list(self._reduced.others(parameters))

    def _name_of(self, parameter: nn.Parameter) -> str:
        names = (n for n, p in self.module.named_parameters() if p is parameter)
        return f"{self.name}.{next(names, 'a parameter')}"

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer of the newest run holds any of it."""
        return any(id(self.held(p)) in self._trained for p in self.module.parameters())


def _note(model: weakref.ref[WholeModel], parameter: nn.Parameter) -> None:
    noting = model()
    if noting is not None and noting.alive:
        noting.note(parameter)


def _is_trained_alone(model: WholeModel) -> bool:
    """Return whether no other whole model is trained.

    In which order the buckets of two came would depend on the graphs, which ranks need not share.
    """
    return not any(other.is_trained for other in living() if other is not model)
