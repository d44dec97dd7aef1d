"""ENGINE: how ranks come to the same number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp_magic.engine.vote import Flag
from fsdp_magic.engine.world import World

_UNKNOWN = -1


class Agreement(Protocol):
    """What ranks agree on about their data."""

    def fewest(self, numbers: Sequence[int | None]) -> list[int | None]:
        """Return the least that any rank says of each; None where any does not know.

        Collective: every rank must call this, with equally many numbers.
        """

    def all_have(self, has: bool) -> bool:
        """Return whether all ranks have something.

        Collective: every rank must call this.
        """

    def any_has(self, has: bool) -> bool:
        """Return whether any rank has something.

        Collective: every rank must call this.
        """


class WorldAgreement:
    """The agreement of a world.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def fewest(self, numbers: Sequence[int | None]) -> list[int | None]:
        """Return the least that any rank says of each; None where any does not know.

        Collective: every rank must call this, with equally many numbers.
        """
        if self._world.world_size == 1:
            return list(numbers)
        said = torch.tensor([_UNKNOWN if n is None else n for n in numbers], dtype=torch.int64)
        dist.all_reduce(said, op=dist.ReduceOp.MIN)
        return [None if n == _UNKNOWN else int(n) for n in said.tolist()]

    def all_have(self, has: bool) -> bool:
        """Return whether all ranks have something.

        Collective: every rank must call this.
        """
        flags, _ = self._world.vote.take(Flag.NONE if has else Flag.NO_BATCH)
        return Flag.NO_BATCH not in flags

    def any_has(self, has: bool) -> bool:
        """Return whether any rank has something.

        Collective: every rank must call this.
        """
        _, having = self._world.vote.take(count=int(has))
        return having > 0


class Alone:
    """The agreement of one process with itself."""

    def fewest(self, numbers: Sequence[int | None]) -> list[int | None]:
        """Return what it says."""
        return list(numbers)

    def all_have(self, has: bool) -> bool:
        """Return what it says."""
        return has

    def any_has(self, has: bool) -> bool:
        """Return what it says."""
        return has
