"""ENGINE: every process group of this rank, broken and connected again together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fsdp_magic.engine.sockets import is_quiet
from fsdp_magic.engine.swappable_group import BACKEND, Surroundings, SwappableGroup

_KEPT = (
    "fsdp_magic: dist.destroy_process_group() does nothing here; the ranks go on, and "
    "%fsdp_shutdown ends them"
)


class Groups:
    """Every swappable group of this process, and the backend that makes them.

    Args:
        surroundings: what all groups share.
        generation: of the transports to begin with.
    """

    def __init__(self, surroundings: Surroundings, *, generation: int) -> None:
        self.surroundings = surroundings
        self._all: list[SwappableGroup] = []
        self._of_the_start = 0
        self.generation = generation
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, self._create, devices=["cpu", "cuda"])

    @contextmanager
    def only(self, ranks: tuple[int, ...] | None, *, refusal: str = "") -> Iterator[None]:
        """Refuse collectives with ranks that do not run the cell inside; None: all run it.

        Args:
            ranks: that run it.
            refusal: what is said then; empty: what suits ``%%fsdp --ranks``.
        """
        everybody = range(dist.get_world_size())
        idle = frozenset() if ranks is None else frozenset(everybody) - frozenset(ranks)
        self.surroundings.idle_ranks, self.surroundings.refusal = idle, refusal
        try:
            yield
        finally:
            self.surroundings.idle_ranks, self.surroundings.refusal = frozenset(), ""

    @property
    def diverged(self) -> str:
        """What this rank issued where the ranks diverged; empty: they have not."""
        found = (group.log.diverged for group in self._all)
        return next((issued.text for issued in found if issued is not None), "")

    def newest(self) -> tuple[str, tuple[int, ...], float]:
        """Return the collective that was issued last: what, which ranks have not, and when.

        For any thread.
        """
        group = self.surroundings.newest
        issued = None if group is None else group.log.newest
        if group is None or issued is None:
            return "", (), 0.0
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # the person has destroyed it since
            return "", (), 0.0
        return issued.text, tuple(ranks[r] for r in group.log.missing()), group.log.issued_at

    def disconnect(self) -> None:
        """Break the transports of every group; safe from any thread.

        Not before no rank sends anything any more: what gloo has not written to a connection when
        it notices the end of that, it forgets, and whoever waits for it to be sent waits for ever.
        Source: gloo, transport/tcp/pair.cc: ``signalException`` passes over the unbound buffers in
        ``tx_``.
        """
        sockets = {d: link for group in list(self._all) for d, link in group.sockets.items()}
        if sockets:
            self.surroundings.settle(self.generation, lambda: is_quiet(sockets))
        for group in list(self._all):
            group.disconnect()

    def end_start(self) -> None:
        """Note that the groups that there are now are those that every engine begins with."""
        self._of_the_start = len(self._all)

    def lose_later_ones(self, why: str) -> None:
        """Refuse from here on every use of a group that a fresh engine does not have."""
        for group in self._all[self._of_the_start :]:
            group.lose(why)
        del self._all[self._of_the_start :]

    def reconnect(self, generation: int) -> None:
        """Replace the transports of every group.

        Collective: every rank must call this, with the same generation.
        """
        self.disconnect()
        self.generation = generation
        for group in self._all:
            group.connect(generation)

    def _create(self, store: Store, rank: int, size: int, timeout: timedelta) -> SwappableGroup:
        group = SwappableGroup(store, rank, size, timeout=timeout, surroundings=self.surroundings)
        group.connect(self.generation)
        self._all.append(group)
        return group


def keep_default_group() -> None:
    """Let no cell destroy the group that the session lives by; the last line of many scripts does.

    A group that the person made is theirs to destroy.
    """
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            print(_KEPT, file=sys.stderr)
        else:
            destroy(group)

    dist.destroy_process_group = destroy_process_group


def is_broken_transport(error: BaseException) -> bool:
    """Return whether an exception is that of a collective whose transport broke.

    Source: gloo raises a bare ``RuntimeError`` that names its source file
    (gloo/transport/tcp/pair.cc), NCCL torch's ``DistError``.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)
