"""ENGINE: process groups whose transport can be replaced under a living model.

FSDP2, DeviceMesh, DTensor and DDP hold a process group for as long as they live, and torch
offers no way to bring a group back once a peer is stuck in it. So every group that we make, and
every ``new_group()`` without a named backend, is a ``SwappableGroup``: a ``ProcessGroup`` that
forwards to an inner group by the tensor's device. When a cell fails, each rank breaks its inner
groups, which frees every peer that waits in one; then all ranks make new inner groups in the
same order, and the holders never notice.

On the way through, each collective is compared with what the other ranks issue
(``collectives.py``).
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.units import ranks_named
from fsdp_magic.engine.collectives import CollectiveLog, DivergedError, collective
from fsdp_magic.engine.group_calls import COALESCED, FORWARDED, POINT_TO_POINT
from fsdp_magic.engine.interrupts import ReleasedByPeerError
from fsdp_magic.engine.named_group import NamedGroup
from fsdp_magic.engine.sockets import recorded_sockets, shut_down

BACKEND = "fsdp_magic"
"""The name that the backend of these groups is registered under."""
_LOOPBACK = "lo"
_MEETING_SECONDS, _ENDING_SECONDS = 0.002, 0.5


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What all groups of a process share.

    Attributes:
        cuda_transport: what moves CUDA tensors, ``nccl`` or ``gloo``.
        directory: of this host, for its owner only.
        given_up: whether the transports of a generation were given up, by this rank or a peer.
        settle: waits a moment until no rank sends anything over a generation any more; told what
            says whether this one does not.
        newest: the group that issued a collective last; None: none has.
        message_peer: the rank that a message was sent to or awaited from last; None: none, or any.
        message_at: when that was.
        idle_ranks: ranks that do not run the cell of this moment.
        refusal: what is said where they would be needed; empty: what suits ``%%fsdp --ranks``.
    """

    cuda_transport: str
    directory: Path
    given_up: Callable[[int], bool]
    settle: Callable[[int, Callable[[], bool]], None]
    newest: SwappableGroup | None = None
    message_peer: int | None = None
    message_at: float = 0.0
    idle_ranks: frozenset[int] = frozenset()
    refusal: str = ""


class SwappableGroup(NamedGroup):
    """A process group that forwards to replaceable inner groups.

    Args:
        store: where the ranks of this group find each other.
        rank, size: in this group.
        timeout: of a collective.
        surroundings: what it shares with all others.

    Attributes:
        log: what its ranks have issued.
    """

    log: CollectiveLog

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout: timedelta, surroundings: Surroundings
    ) -> None:
        super().__init__(rank, size, BACKEND)
        self._store = store
        self._around = surroundings
        self._timeout = timeout
        self._sockets: dict[int, str] = {}
        self._generation = 0
        self._cpu: Any = None
        self._cuda: Any = None
        self._lost: str | None = None

    # -- transports

    def connect(self, generation: int) -> None:
        """Make the inner groups of a generation.

        Collective: every rank of the group must call this.
        """
        self._generation = generation
        self._let_go()
        path = self._meet()
        self.log = CollectiveLog(path, self._rank, self._size)
        with recorded_sockets() as self._sockets:
            self._cpu = self._gloo(f"cpu{generation}")
        if self._rank == 0:
            path.unlink()  # gloo has met all ranks, so each of them has mapped it

    def _meet(self) -> Path:
        """Wait for all ranks in Python, which a release can end; gloo's own wait it cannot.

        Returns:
            The file of the group's log, made by its first rank.
        """
        here = dist.PrefixStore(f"here{self._generation}", self._store)  # type: ignore[attr-defined]
        name = f"collectives-{uuid.uuid4().hex}" if self._rank == 0 else ""
        if name:
            CollectiveLog.new_file(self._around.directory / name, self._size)
        here.set(str(self._rank), name)
        everybody = [str(rank) for rank in range(self._size)]
        while not here.check(everybody):
            if self._around.given_up(self._generation):
                raise ReleasedByPeerError
            time.sleep(_MEETING_SECONDS)
        return self._around.directory / here.get("0").decode()

    def lose(self, why: str) -> None:
        """Refuse every use from here on."""
        self.disconnect()
        self._lost = why
        self._let_go()

    @property
    def sockets(self) -> dict[int, str]:
        """The connections that may be open: descriptor -> kernel's name of it."""
        return dict(self._sockets)

    def disconnect(self) -> None:
        """Make every collective that waits in this group, here or on a peer, fail at once."""
        sockets, self._sockets = self._sockets, {}
        shut_down(sockets)
        if self._cuda is not None:
            self._cuda.abort()

    def _let_go(self) -> None:
        """Drop the inner groups.

        In a thread of its own: gloo waits in its destructor for the collectives under way, and one
        that did not notice that its connection is gone (``Groups.disconnect``) never ends. That
        group then stays, without use; the rank must not wait for it.
        """
        held = [self._cpu, self._cuda]
        self._cpu = self._cuda = None
        if held == [None, None]:
            return
        ending = threading.Thread(target=held.clear, name="fsdp_magic transports", daemon=True)
        ending.start()
        ending.join(_ENDING_SECONDS)

    def _gloo(self, prefix: str) -> Any:
        store = PrefixStore(prefix, self._store)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface=_interface())]
        options._timeout = self._timeout
        options._threads = 2
        return dist.ProcessGroupGloo(store, self._rank, self._size, options)

    def _inner(self, device: str) -> Any:
        """Return the inner group for tensors on a kind of device."""
        if self._lost is not None:
            raise FsdpError(self._lost)
        if device == "cpu" or self._around.cuda_transport == "gloo":
            return self._cpu
        if self._cuda is None:  # made at the first use, in the same order on all its ranks
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = PrefixStore(f"cuda{self._generation}", self._store)
            self._cuda = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        return self._cuda

    # -- collectives

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group, on the host."""
        inner = self._inner("cpu")
        return self._issue(inner.barrier, "barrier", () if opts is None else (opts,), {})

    def _refuse_idle(self, wanted: Sequence[int]) -> None:
        """Raise if a wanted rank does not run the cell: it would be waited for in vain."""
        absent = tuple(self._around.idle_ranks.intersection(wanted))
        if absent and self._around.refusal:
            raise FsdpError(self._around.refusal)
        if absent:
            do_not = "do" if len(absent) > 1 else "does"
            raise FsdpError(
                f"{ranks_named(absent)} {do_not} not run this cell (--ranks), and what it "
                "does here needs every rank, as a sharded model's forward does; leave --ranks out"
            )

    def _issue(
        self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an inner group's method if all ranks of the group do the same now.

        Raises:
            DivergedError: if one of them does something else.
            FsdpError: if one of them does not run the cell.
            ReleasedByPeerError: if the transports were given up.
        """
        if self._around.given_up(self._generation):
            raise ReleasedByPeerError  # what is sent now could be lost, and waited for
        if self._around.idle_ranks:
            self._refuse_idle(dist.get_process_group_ranks(self))
        self._around.newest = self
        try:
            self.log.note(collective(name, (*args, *kwargs.values())))
            return call(*args, **kwargs)
        except DivergedError as error:
            error.peer = dist.get_process_group_ranks(self)[error.peer]
            raise
        except Exception:  # refused for its arguments, before anything was sent
            self.log.take_back()
            raise

    def _note_message(self, peer: int | None) -> None:
        """Note with which rank of the group a message is exchanged; None: with any."""
        if peer is not None:
            self._refuse_idle([peer := dist.get_process_group_ranks(self)[peer]])
        self._around.message_peer, self._around.message_at = peer, time.monotonic()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing; inner groups count for themselves."""

    def _get_sequence_number_for_group(self) -> int:
        return int(self._cpu._get_sequence_number_for_group())

    def _start_coalescing(self, device: torch.device) -> None:
        self._inner(device.type)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._inner(device.type)._end_coalescing()


def _forward(name: str, older_name: str) -> Callable[..., Any]:
    """Return a method that calls its namesake on the inner group for its first tensor."""

    def method(self: SwappableGroup, *args: Any, **kwargs: Any) -> Any:
        device = next(_devices((args, kwargs)), "cpu")
        inner = self._inner(device)
        call = getattr(inner, name, None) or getattr(inner, older_name)
        if older_name in POINT_TO_POINT:
            self._note_message(None if older_name == "recv_anysource" else args[1])
            return call(*args, **kwargs)
        return self._issue(call, older_name, args, kwargs)

    method.__name__ = name
    return method


def _forward_coalesced(name: str, single_name: str) -> Callable[..., Any]:
    """Return a method that takes lists, also where the inner group takes one pair at a time."""

    def method(
        self: SwappableGroup, outputs: list[Any], inputs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        inner = self._inner(next(_devices(inputs), "cpu"))
        call = getattr(inner, name, None) or _one_by_one(getattr(inner, single_name))
        return self._issue(call, single_name, (outputs, inputs, *args), kwargs)

    method.__name__ = name
    return method


def _one_by_one(single: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of lists that calls one of single tensors."""

    def together(outputs: list[Any], inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        pairs = list(zip(outputs, inputs, strict=True))
        for output, tensor in pairs[:-1]:
            single(output, tensor, *args, **kwargs).wait()
        return single(*pairs[-1], *args, **kwargs)

    return together


for _name, _single_name in COALESCED.items():
    setattr(SwappableGroup, _name, _forward_coalesced(_name, _single_name))
for _name, _older_name in FORWARDED.items():
    setattr(SwappableGroup, _name, _forward(_name, _older_name))


def _devices(value: Any) -> Iterator[str]:
    """Yield the kinds of device of the tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value.device.type
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _devices(item)
    elif isinstance(value, dict):
        yield from _devices(list(value.values()))


def _interface() -> str:
    """Return the network interface of gloo; loopback unless a person named another."""
    return os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK)
