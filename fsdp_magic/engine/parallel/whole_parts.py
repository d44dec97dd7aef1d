"""ENGINE: the parameters that FSDP2 leaves whole on every rank, in a person's own backward.

FSDP2 cannot cut a scalar, and layers with running statistics are not cast: it reduces neither.
Steps of training cells do that themselves. After any other backward their gradients are averaged,
as FSDP2 averages those of shards: also on a rank where none of them got one, so what counts is
that the backward reached the model.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.sharded_model import ShardedModel
from fsdp_magic.engine.parallel.unreduced_gradients import UnreducedGradients
from fsdp_magic.engine.parallel.whole_models import (
    forget_averaged,
    reduce_after_backward,
    remember_averaged,
    requiring_gradient,
)
from fsdp_magic.engine.world import World


class WholeParts:
    """The parameters of a sharded model that every rank holds whole.

    Collective: every rank must make its own.

    Args:
        model: that has just been sharded.
        world: over whom.
    """

    def __init__(self, model: ShardedModel, *, world: World) -> None:
        self._model = weakref.ref(model)
        whole = [p for p in model.module.parameters() if not isinstance(p, DTensor)]
        whole = [p for p in whole if p.is_floating_point() or p.is_complex()]
        self._parameters = whole  # as many on every rank, whatever becomes of them
        self._within_step = False
        if not whole:
            return
        self._unreduced = UnreducedGradients(world.gradients_group())
        self.come_back()
        itself = weakref.ref(self)
        for parameter in whole:
            note = functools.partial(_note, itself)
            with requiring_gradient(parameter):  # one that is frozen may be trained later
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for _, unit in torch_private.units(model.module):
            torch_private.call_after_backward(unit, functools.partial(_reached, itself))

    def leave(self) -> None:
        """Be averaged no more: others take this model's place."""
        if (model := self._model()) is not None:
            forget_averaged(model.module)

    def come_back(self) -> None:
        """Be averaged again."""
        model = self._model()
        if model is not None and self._parameters:
            remember_averaged(model.module, self)

    @contextmanager
    def within_step(self) -> Iterator[None]:
        """Have a backward of a step inside, which takes care of all that trains."""
        self._within_step = True
        try:
            yield
        finally:
            self._within_step = False

    def unsynced(self, parameters: Collection[int]) -> AbstractContextManager[None]:
        """Leave the gradients of parameters on this rank inside.

        Args:
            parameters: their ids.
        """
        return self._unreduced.unsynced(parameters)

    def note(self, parameter: nn.Parameter) -> None:
        """Note that a gradient has arrived."""
        if self._within_step:
            return
        self._unreduced.note(parameter)
        model = self._model()
        # a reentrant checkpoint goes backward within the backward, which is not at its end
        if model is not None and not torch_private.is_in_backward(model.module):
            self.reached()

    def reached(self) -> None:
        """Note that a backward has reached the model."""
        is_synced = any(map(self._unreduced.is_synced, self._parameters))
        if is_synced and not self._within_step:
            reduce_after_backward(self)

    def reduce(self) -> None:
        """Average what is not.

        Collective: every rank must call this.
        """
        model = self._model()
        assert model is not None
        self._unreduced.average(self._parameters, name=model.name)

    def forget_iteration(self) -> None:
        """Drop what a backward left on this rank alone."""
        if self._parameters:
            self._unreduced.drop(self._parameters)


def _note(parts: weakref.ref[WholeParts], parameter: nn.Parameter) -> None:
    alive = parts()
    if alive is not None:
        alive.note(parameter)


def _reached(parts: weakref.ref[WholeParts]) -> None:
    alive = parts()
    if alive is not None:
        alive.reached()
