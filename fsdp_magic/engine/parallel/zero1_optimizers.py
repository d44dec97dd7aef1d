"""ENGINE: optimizers that hold shards of whole parameters: what they do concerns the whole ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_magic.engine.optimizers import parameters_of

if TYPE_CHECKING:
    from fsdp_magic.engine.parallel.zero1 import Zero1Model

    Concerned = Callable[[Optimizer], Iterator[Zero1Model]]


@functools.cache
def watch_optimizers(concerned: Concerned) -> None:
    """Have every optimizer of this process tell before and after its steps; once for all models.

    Args:
        concerned: gives the models that an optimizer holds something of.
    """

    def before(optimizer: Optimizer, *_: object) -> None:
        for model in concerned(optimizer):
            model.before_step(optimizer)

    def after(optimizer: Optimizer, *_: object) -> None:
        for model in concerned(optimizer):
            model.after_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    _watch_clearing(concerned)
    _watch_unscaling(concerned)


def _watch_clearing(concerned: Concerned) -> None:
    zero_grad = Optimizer.zero_grad

    @functools.wraps(zero_grad)
    def both(self: Optimizer, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        _clear_whole(self, concerned(self), set_to_none=set_to_none)

    Optimizer.zero_grad = both  # type: ignore[method-assign]


def _watch_unscaling(concerned: Concerned) -> None:
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def whole(self: GradScaler, optimizer: Optimizer, *args: Any) -> Any:
        with _shown_whole(optimizer, concerned(optimizer)):
            return unscale(self, optimizer, *args)

    GradScaler._unscale_grads_ = whole  # type: ignore[method-assign, assignment]


@contextmanager
def _shown_whole(optimizer: Optimizer, models: Iterable[Zero1Model]) -> Iterator[None]:
    """Have an optimizer hold whole parameters inside, to have their gradients unscaled whole.

    Not finite is then what is so anywhere, without asking the other ranks.
    """
    whole = {
        id(shard): parameter
        for model in models
        for parameter, shard in model.cut()
        if model.shows_whole(parameter, shard)
    }
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [whole.get(id(p), p) for p in group["params"]]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def _clear_whole(optimizer: Optimizer, models: Iterable[Zero1Model], *, set_to_none: bool) -> None:
    """Clear the whole gradients of which an optimizer has cleared the rows."""
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    for model in models:
        for parameter, shard in model.cut():
            if id(shard) not in held or parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()
                model.cleared(parameter, shard)
