"""ENGINE: shards of whole parameters that are views of them, and their gradients.

A write through a shard reaches this rank's rows of the whole and no others. So a shard does not
share the whole tensor's count of writes (it is made of ``.data``), and either's tell what was
written through it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.row_gathering import own_rows
from fsdp_magic.engine.world import World


@dataclass(slots=True)
class _Link:
    """A whole gradient whose rows are a shard's, with how often either had been written then."""

    gradient: weakref.ref[torch.Tensor]
    whole_writes: int
    shard_writes: int


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
        self._linked: dict[int, _Link] = {}
        self._writes: dict[int, int] = {}
        self._followed: dict[int, tuple[int, int]] = {}
        """Where a whole parameter was, and the shard, when the shard was made a view of it."""

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
        rows = own_rows(parameter.data, self._world)
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
        self._followed.pop(id(parameter), None)
        self.gathered(parameter, shard)
        return shard

    def link(self, parameter: nn.Parameter, shard: nn.Parameter) -> None:
        """Have a shard's gradient be the rows of the whole one; if either is cleared, both are.

        To be called before each step of an optimizer.
        """
        self._follow(parameter, shard)
        gradient = self.gradient_of(parameter, shard)
        if gradient is None:
            shard.grad = None
        elif not self._is_linked(parameter, gradient):
            rows, like = own_rows(gradient.data, self._world), shard.data
            assert isinstance(like, DTensor)
            shard.grad = torch_private.shard_like(rows, like)
            self.settle_gradient(parameter, shard)

    def settle_gradient(self, parameter: nn.Parameter, shard: nn.Parameter) -> None:
        """Count writes to a gradient from here: the whole one is the same on every rank."""
        whole, rows = parameter.grad, shard.grad
        if whole is not None and rows is not None:
            self._linked[id(parameter)] = _Link(
                weakref.ref(whole), whole._version, torch_private.writes_to(rows)
            )

    def wrote_gradient(self, parameter: nn.Parameter, shard: nn.Parameter) -> bool:
        """Return whether a gradient was written through its shard, on this rank's rows only."""
        link = self._linked.get(id(parameter))
        if link is None or shard.grad is None or link.gradient() is not parameter.grad:
            return False
        return torch_private.writes_to(shard.grad) != link.shard_writes

    def wrote_both_gradients(self, parameter: nn.Parameter, shard: nn.Parameter) -> bool:
        """Return whether a gradient was written through its shard, and as a whole too."""
        if not self.wrote_gradient(parameter, shard):
            return False
        assert parameter.grad is not None
        return parameter.grad._version != self._linked[id(parameter)].whole_writes

    def gathered(self, parameter: nn.Parameter, shard: nn.Parameter) -> None:
        """Count writes to a parameter from here: the whole one is the same on every rank."""
        self._writes[id(parameter)] = torch_private.writes_to(shard)

    def wrote(self, parameter: nn.Parameter, shard: nn.Parameter) -> bool:
        """Return whether a parameter was written through its shard since."""
        return torch_private.writes_to(shard) != self._writes[id(parameter)]

    def _follow(self, parameter: nn.Parameter, shard: nn.Parameter) -> None:
        """Have a shard be a view again if the person gave its parameter another tensor."""
        at = parameter.data_ptr(), torch_private.address_of(shard)
        if self._followed.get(id(parameter)) == at:
            return
        wrote = self.wrote(parameter, shard)
        torch_private.point_at(shard, own_rows(parameter.data, self._world))
        self._followed[id(parameter)] = at[0], torch_private.address_of(shard)
        if not wrote:
            self.gathered(parameter, shard)

    def gradient_of(self, parameter: nn.Parameter, shard: nn.Parameter) -> torch.Tensor | None:
        """Return a whole gradient; one that was cleared through the shard is cleared first."""
        gradient = parameter.grad
        if gradient is not None and shard.grad is None and self._is_linked(parameter, gradient):
            parameter.grad = gradient = None
        return gradient

    def _is_linked(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        link = self._linked.get(id(parameter))
        return link is not None and link.gradient() is gradient


def has_rows(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be cut into rows."""
    return parameter.ndim > 0 and parameter.numel() > 0
