"""ENGINE: which trained parameters a step used, on any rank.

FSDP2 counts a gradient that is missing on this rank as zeros, so that ranks may use different
parts of a unit. A parameter that no rank used in the whole step must stay without gradient, as in
one process: an optimizer with weight decay would move it. What a backward used of a model is
noted by the model; a parameter of none was used if it has a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_magic.engine.parallel.sharded_model import ShardedModel


class Used:
    """The parameters that got a gradient on this rank since the last reset.

    Args:
        parameters: what the run trains; in the same order on every rank.
        models: the models they belong to.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], models: Sequence[ShardedModel]) -> None:
        self._parameters = list(parameters)
        self._models = list(models)

    def reset(self) -> None:
        """Forget what was used; to be called when a step begins."""
        for model in self._models:
            model.used.clear()

    @property
    def some_missing(self) -> bool:
        """Whether a parameter that requires grad got none on this rank."""
        used = self._used_ids()
        return any(not _is_used(p, used) for p in self._parameters if p.requires_grad)

    def settle(self, *, keep: Collection[torch.Tensor] = ()) -> bool:
        """Make gradients those of one process.

        A parameter that no rank used has none; a whole one that another rank used has zeros here.

        Collective: every rank must call this, after the last backward of a step and before
        gradients of whole parameters are added up.

        Args:
            keep: parameters that had a gradient before, which stays.

        Returns:
            Whether any rank used any of them.
        """
        kept = {id(parameter) for parameter in keep}
        trained = [p for p in self._parameters if p.requires_grad]
        if not trained:
            return False
        used = self._used_ids()
        flags = torch.tensor([_is_used(p, used) for p in trained], dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)  # a CPU tensor: over the control group
        some_used = {id(p) for p, flag in zip(trained, flags.tolist(), strict=True) if flag}
        for model in self._models:
            model.fill_missing(some_used)
        for parameter, anywhere in zip(trained, flags.tolist(), strict=True):
            if not anywhere:
                if id(parameter) not in kept:
                    parameter.grad = None
            elif parameter.grad is None and not isinstance(parameter, DTensor):
                parameter.grad = torch.zeros_like(parameter)
        return bool(some_used)

    def _used_ids(self) -> set[int]:
        return set().union(*(model.used for model in self._models))


def _is_used(parameter: torch.Tensor, used: set[int]) -> bool:
    if id(parameter) in used:
        return True
    return not isinstance(parameter, DTensor) and parameter.grad is not None
