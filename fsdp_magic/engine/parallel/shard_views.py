"""ENGINE: shards of whole parameters that are views of them, and their gradients."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.row_gathering import own_rows
from fsdp_magic.engine.world import World


class ShardViews:
    """The shards of one model's parameters on this rank.

    They are held weakly: optimizers hold them, and they would keep the weights of a model that is
    gone.

    Args:
        world: whose ranks hold one each.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._shards: dict[int, weakref.ref[nn.Parameter]] = {}
        self._linked: dict[int, weakref.ref[torch.Tensor]] = {}

    def held(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the shard of a parameter that something holds; itself if nothing does."""
        reference = self._shards.get(id(parameter))
        shard = None if reference is None else reference()
        return parameter if shard is None else shard

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter's shard, made anew if nothing holds one; itself if it has no rows."""
        shard = self.held(parameter)
        if shard is not parameter or not has_rows(parameter):
            return shard
        rows = own_rows(parameter.detach(), self._world)
        shard = nn.Parameter(
            DTensor.from_local(
                rows,
                self._world.mesh,
                [Shard(0)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
            requires_grad=parameter.requires_grad,
        )
        vars(shard).update(vars(parameter))  # a person's marks on it, such as p.no_decay
        self._shards[id(parameter)] = weakref.ref(shard)
        return shard

    def link(self, parameter: nn.Parameter, shard: nn.Parameter) -> None:
        """Have a shard's gradient be the rows of the whole one; if either is cleared, both are."""
        gradient = self.gradient_of(parameter, shard)
        if gradient is None:
            shard.grad = None
        elif not self._is_linked(parameter, gradient):
            rows, like = own_rows(gradient.detach(), self._world), shard.data
            assert isinstance(like, DTensor)
            shard.grad = torch_private.shard_like(rows, like)
            self._linked[id(parameter)] = weakref.ref(gradient)

    def gradient_of(self, parameter: nn.Parameter, shard: nn.Parameter) -> torch.Tensor | None:
        """Return a whole gradient; one that was cleared through the shard is cleared first."""
        gradient = parameter.grad
        if gradient is not None and shard.grad is None and self._is_linked(parameter, gradient):
            parameter.grad = gradient = None
        return gradient

    def _is_linked(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        reference = self._linked.get(id(parameter))
        return reference is not None and reference() is gradient


def has_rows(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be cut into rows."""
    return parameter.ndim > 0 and parameter.numel() > 0
