"""ENGINE: gradients that every rank holds whole, added up over the ranks while backward runs.

A large gradient is reduced where it is. Small ones are copied into a bucket, reduced together and
copied back; few buckets are under way at a time, so that they take little memory. Buckets are
launched in one order on every rank, each only after the one before it, whatever order gradients
arrive in: so ranks that use different parameters launch the same. Nothing in a backward waits
for another rank, which may be waiting for this one elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdp_magic.core.units import MIB
from fsdp_magic.engine.collectives import UNITS

BUCKET_BYTES = 4 * MIB
"""A gradient of this size is reduced by itself; smaller ones share buckets of about this size."""
_MOST_COPIED_BYTES = 4 * BUCKET_BYTES


@dataclass(slots=True)
class _UnderWay:
    """A bucket that was launched."""

    work: dist.Work
    gradients: list[torch.Tensor]
    copy: torch.Tensor | None

    @property
    def copied_bytes(self) -> int:
        return 0 if self.copy is None else self.copy.nbytes

    def land(self) -> None:
        """Wait for it, and put the sums where the gradients are."""
        self.work.wait()
        if self.copy is not None:
            torch._foreach_copy_(self.gradients, _parts(self.copy, self.gradients))


def buckets_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in buckets, in the order in which the last of each is expected.

    Args:
        parameters: in the order in which their gradients are expected; the same on every rank.
    """
    buckets: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        bucket, filled = filling.get(parameter.dtype, ([], 0))
        size = parameter.nbytes
        if size >= BUCKET_BYTES:
            buckets.append([parameter])
            continue
        bucket.append(parameter)
        if filled + size < BUCKET_BYTES:
            filling[parameter.dtype] = bucket, filled + size
        else:
            buckets.append(bucket)
            filling.pop(parameter.dtype, None)
    return [*buckets, *(bucket for bucket, _ in filling.values())]


class GradientReduction:
    """The reduction of one step's gradients.

    Args:
        buckets: of parameters; the same on every rank.
        name: of the model, for who waits in one of its collectives.
        group: the ranks; used by nothing else, so that nothing comes in between.
    """

    def __init__(
        self, buckets: Sequence[Sequence[nn.Parameter]], *, name: str, group: dist.ProcessGroup
    ) -> None:
        self._buckets = buckets
        self._group = group
        self._reduce = UNITS.naming(name, dist.all_reduce)
        self._bucket_of = {id(p): n for n, bucket in enumerate(buckets) for p in bucket}
        self._missing = [sum(p.requires_grad for p in bucket) for bucket in buckets]
        self._launched = 0
        self._under_way: deque[_UnderWay] = deque()

    def is_launched(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of a parameter is on its way."""
        return self._bucket_of.get(id(parameter), self._launched) < self._launched

    def arrived(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is complete, and launch what can be launched now."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        self._missing[bucket] -= 1
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            if not self._has_room():
                return
            self._launch([p for p in self._buckets[self._launched] if p.requires_grad])

    def finish(self) -> None:
        """Launch the rest, without parameters that have no gradient on any rank, and wait for all.

        Collective: every rank must call this, with gradients on the same parameters.
        """
        while self._launched < len(self._buckets):
            self._launch([p for p in self._buckets[self._launched] if p.grad is not None])
            while not self._has_room():
                self._under_way.popleft().land()
        while self._under_way:
            self._under_way.popleft().land()

    def _has_room(self) -> bool:
        """Return whether another bucket may be copied; what has landed makes room."""
        while self._under_way and self._under_way[0].work.is_completed():
            self._under_way.popleft().land()
        return sum(each.copied_bytes for each in self._under_way) < _MOST_COPIED_BYTES

    @torch.no_grad()
    def _launch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send the next bucket on its way."""
        self._launched += 1
        gradients = [_dense(parameter) for parameter in parameters]
        if not gradients:
            return
        copy = None
        if len(gradients) > 1:
            copy = gradients[0].new_empty(sum(g.numel() for g in gradients))
            torch._foreach_copy_(_parts(copy, gradients), gradients)
        work = self._reduce(
            gradients[0] if copy is None else copy, group=self._group, async_op=True
        )
        self._under_way.append(_UnderWay(work, gradients, copy))


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, made such that it can be reduced in place."""
    assert parameter.grad is not None
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad.detach()


def _parts(copy: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a bucket, each shaped as its gradient."""
    parts = torch.split(copy, [gradient.numel() for gradient in gradients])
    return [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
