"""ENGINE: gradients that a person put in place: ``torch.autograd.grad`` averages nothing.

What a backward leaves is averaged by our hooks. A gradient that was assigned may be made of such,
or reduced by the person, and is the same on every rank then; else ranks would drift apart for good.
So before an optimizer steps with assigned gradients, ranks compare what they have.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.collectives import UNITS
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.parallel.whole_models import living

if TYPE_CHECKING:
    from fsdp_magic.engine.parallel.whole_model import WholeModel

_TOLERANCE = 1e-5
"""Relative; sums on a card may be added up in another order."""


class ReducedGradients:
    """The gradients that hooks of ours have reduced; held weakly."""

    def __init__(self) -> None:
        self._of: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that the gradients of parameters are reduced."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._of[id(parameter)] = weakref.ref(parameter.grad)

    def others(self, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
        """Yield the gradients that came otherwise."""
        for parameter in parameters:
            known = self._of.get(id(parameter))
            if parameter.grad is not None and (known is None or known() is not parameter.grad):
                yield parameter.grad


@functools.cache
def watch_steps() -> None:
    """Compare assigned gradients before every optimizer step of this process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    for model in living():
        if not model.alive:
            continue
        own = model.own_gradients(held)
        if own and not _are_alike(own, model):
            STEPS.refused(optimizer)  # it was counted before we were asked
            raise FsdpError(
                f"the gradients of {model.name} that {type(optimizer).__name__} would step with "
                "were not averaged over the ranks: torch.autograd.grad and assigning p.grad do "
                "not; type loss.backward(), or average them: for p in "
                f"{model.name}.parameters(): dist.all_reduce(p.grad); p.grad /= world_size"
            )


def _are_alike(own: Sequence[torch.Tensor], model: WholeModel) -> bool:
    """Return whether all ranks have the same gradients, as far as sums and norms tell.

    Collective: every rank must call this.
    """
    ours = torch.stack([torch.tensor(float(len(own)), dtype=torch.float64), *_print_of(own)])
    all_gather = UNITS.naming(model.name, dist.all_gather)
    ranks = [torch.empty_like(ours) for _ in range(model.group.size())]
    all_gather(ranks, ours, group=model.group)
    margin = _TOLERANCE * ranks[0][2].abs()
    near = [
        torch.isclose(each, ranks[0], rtol=_TOLERANCE, atol=0, equal_nan=True) for each in ranks
    ]
    small = [(each[1] - ranks[0][1]).abs() <= margin for each in ranks]  # a sum may cancel out
    return all(bool(n[0] & n[2] & (n[1] | s)) for n, s in zip(near, small, strict=True))


def _print_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum and the norm of gradients together."""
    sums, norms = [], []
    for gradient in gradients:
        values = gradient.detach()
        values = values.coalesce().values() if values.is_sparse else values
        values = torch.view_as_real(values) if values.is_complex() else values
        sums.append(values.sum(dtype=torch.float64))
        norms.append(torch.linalg.vector_norm(values, dtype=torch.float64))
    norm = torch.linalg.vector_norm(torch.stack([each.cpu() for each in norms]))
    return [torch.stack([each.cpu() for each in sums]).sum(), norm]
