"""ENGINE: process groups whose transport can be replaced under a living model.

FSDP2, DeviceMesh, DTensor and DDP hold a process group for as long as they live, and torch
offers no way to bring a group back once a peer is stuck in it. So every group that we make, and
every ``new_group()`` without a named backend, is a ``SwappableGroup``: a ``ProcessGroup`` that
forwards to an inner group by the tensor's device. When a cell fails, each rank breaks its inner
groups, which frees every peer that waits in one; then all ranks make new inner groups in the
same order, and the holders never notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.interrupts import ReleasedByPeerError
from fsdp_magic.engine.sockets import recorded_sockets, shut_down

BACKEND = "fsdp_magic"
_LOOPBACK = "lo"
_MEETING_SECONDS = 0.002

_FORWARDED = {
    # name on the wrapper -> name on an inner group that lacks it (torch 2.13 renamed some)
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "allgather": "allgather",
    "allgather_coalesced": "allgather_coalesced",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
}

_COALESCED = {
    # takes lists of outputs and inputs -> takes one of each; gloo has only the latter
    "allgather_into_tensor_coalesced": "_allgather_base",
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}


class SwappableGroup(dist.ProcessGroup):
    """A process group that forwards to replaceable inner groups.

    Args:
        store: where the ranks of this group find each other.
        rank, size: in this group.
        timeout: of a collective.
        cuda_transport: what moves CUDA tensors.
        given_up: whether the transports of a generation were given up, by this rank or a peer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        cuda_transport: str,
        given_up: Callable[[int], bool],
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one form
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._cuda_transport = cuda_transport
        self._given_up = given_up
        self._name = ""
        self._description = ""
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
        self._cuda = None
        self._meet()
        with recorded_sockets() as self._sockets:
            self._cpu = self._gloo(f"cpu{generation}")

    def _meet(self) -> None:
        """Wait for all ranks in Python, which a release can end; gloo's own wait it cannot."""
        here = dist.PrefixStore(f"here{self._generation}", self._store)  # type: ignore[attr-defined]
        here.set(str(self._rank), "")
        everybody = [str(rank) for rank in range(self._size)]
        while not here.check(everybody):
            if self._given_up(self._generation):
                raise ReleasedByPeerError
            time.sleep(_MEETING_SECONDS)

    def lose(self, why: str) -> None:
        """Refuse every use from here on."""
        self.disconnect()
        self._lost, self._cpu, self._cuda = why, None, None

    def disconnect(self) -> None:
        """Make every collective that waits in this group, here or on a peer, fail at once."""
        for descriptor, link in self._sockets.items():
            shut_down(descriptor, link)
        self._sockets = {}
        if self._cuda is not None:
            self._cuda.abort()

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
        if device == "cpu" or self._cuda_transport == "gloo":
            return self._cpu
        if self._cuda is None:  # made at the first use, in the same order on all its ranks
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = PrefixStore(f"cuda{self._generation}", self._store)
            self._cuda = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        return self._cuda

    # -- what torch asks of a group

    def size(self) -> int:
        """Return the number of ranks in this group."""
        return self._size

    def rank(self) -> int:
        """Return this process's rank in this group."""
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """Return the name that the backend is registered under."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name that functional collectives find the group by."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name; torch's C++ side asks here."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name; torch's C++ side says it here."""
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set what the group is for."""
        self._description = description

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group, on the host."""
        inner = self._inner("cpu")
        return inner.barrier() if opts is None else inner.barrier(opts)

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
        return call(*args, **kwargs)

    method.__name__ = name
    return method


def _forward_coalesced(name: str, single_name: str) -> Callable[..., Any]:
    """Return a method that takes lists, also where the inner group takes one pair at a time."""

    def method(
        self: SwappableGroup, outputs: list[Any], inputs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        inner = self._inner(next(_devices(inputs), "cpu"))
        together = getattr(inner, name, None)
        if together is not None:
            return together(outputs, inputs, *args, **kwargs)
        single = getattr(inner, single_name)
        pairs = list(zip(outputs, inputs, strict=True))
        for output, tensor in pairs[:-1]:
            single(output, tensor, *args, **kwargs).wait()
        return single(*pairs[-1], *args, **kwargs)

    method.__name__ = name
    return method


for _name, _single_name in _COALESCED.items():
    setattr(SwappableGroup, _name, _forward_coalesced(_name, _single_name))
for _name, _older_name in _FORWARDED.items():
    setattr(SwappableGroup, _name, _forward(_name, _older_name))


class Groups:
    """Every swappable group of this process, and the backend that makes them.

    Args:
        cuda_transport: what moves CUDA tensors, ``nccl`` or ``gloo``.
        generation: of the transports to begin with.
        given_up: whether the transports of a generation were given up.
    """

    def __init__(
        self, cuda_transport: str, *, generation: int, given_up: Callable[[int], bool]
    ) -> None:
        self._cuda_transport = cuda_transport
        self._given_up = given_up
        self._all: list[SwappableGroup] = []
        self._of_the_start = 0
        self.generation = generation
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, self._create, devices=["cpu", "cuda"])

    def disconnect(self) -> None:
        """Break the transports of every group; safe from any thread."""
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
        group = SwappableGroup(
            store,
            rank,
            size,
            timeout=timeout,
            cuda_transport=self._cuda_transport,
            given_up=self._given_up,
        )
        group.connect(self.generation)
        self._all.append(group)
        return group


def is_broken_transport(error: BaseException) -> bool:
    """Return whether an exception is that of a collective whose transport broke.

    Source: gloo raises a bare ``RuntimeError`` that names its source file
    (gloo/transport/tcp/pair.cc), NCCL torch's ``DistError``.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


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
