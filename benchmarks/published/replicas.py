"""DDP of torch 1.12 under accelerate 0.7: whole copies, and buckets beside the gradients.

Source: ``torch/nn/parallel/distributed.py``, ``torch/csrc/distributed/c10d/{reducer,comm}.cpp`` of
torch 1.12; the functions named below are theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_magic.core.planning.overlay import Overlay, Setting
from fsdp_magic.core.planning.step_trace import Reached, StepTrace, TracedParameter
from fsdp_magic.core.units import MIB
from published.loops import take_buffers, without_buffers

FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB
"""Source: ``kDefaultFirstBucketBytes``, ``bucket_cap_mb``. Gradients are no views of buckets there,
unless asked for."""
BROADCAST = 250 * MIB
"""Parameters once, and buffers in every forward, are joined in pieces of it and sent. Source:
``broadcast_bucket_size``, ``_sync_params_and_buffers``, ``_sync_buffers``."""
IN_FLIGHT = 2
"""Pieces that are there at once. Source: ``broadcast_coalesced``, ``max_in_flight``."""


class ReplicaOverlay(Overlay):
    """Whole parameters, zeroed gradients and, on several ranks, buckets."""

    def __init__(self, trace: StepTrace, setting: Setting) -> None:
        super().__init__(without_buffers(trace), setting)
        self._buffers = trace.standing
        self._arrived: dict[str, None] = {}
        """Parameters in the order in which their gradients came first."""
        self._is_rebuilt = False

    @property
    def _is_spread(self) -> bool:
        return self.setting.world_size > 1

    def begin(self) -> None:
        """Take parameters, send them, and take the buckets that the reducer makes at once."""
        take_buffers(self.ledger, self._buffers)
        sizes = {name: p.elements * 4 for name, p in self.trace.parameters.items()}
        for name, size in sizes.items():
            self.ledger.take(("parameter", name), size, "parameter", place=name)
        if self._is_spread:
            self._broadcast(sizes.values())
            self._take_buckets(reversed(self.trace.parameters))

    def _broadcast(self, sizes: Iterable[float]) -> None:
        """Take and give back pieces that tensors are joined in."""
        pieces = _pieces(sizes, BROADCAST, BROADCAST)
        for number, size in enumerate(pieces):
            self.ledger.take(("piece", number), size, "communication")
            self.ledger.give_back(("piece", number - IN_FLIGHT + 1))
        self.ledger.give_back(("piece", len(pieces) - 1))

    def _take_buckets(self, order: Iterable[str]) -> None:
        """Take buckets for parameters in an order. Source: ``initialize_buckets``."""
        for key in self.ledger.held("bucket"):
            self.ledger.give_back(key)
        sizes = (self.trace.parameters[name].elements * 4 for name in order)
        for number, size in enumerate(_pieces(sizes, FIRST_BUCKET, BUCKET)):
            self.ledger.take(("bucket", number), size, "communication")

    def passes(self, reached: Reached, *, is_last: bool) -> None:
        """Keep each gradient as it comes; from the second step on it is there."""
        if reached.mark == "forward" and not reached.name and self._is_spread:
            self._begin_forward()
        key = ("gradient", reached.name)
        if reached.mark == "gradient" and not self.ledger.holds(key):
            self._arrived[reached.name] = None
            size = self.trace.parameters[reached.name].elements * 4
            self.ledger.take(key, size, "gradient", place=reached.name)

    def _begin_forward(self) -> None:
        """Send buffers; make buckets anew once, in the order in which gradients came.

        Source: ``rebuild_buckets``.
        """
        if self._arrived and not self._is_rebuilt:
            self._is_rebuilt = True
            self._take_buckets(self._arrived)
        self._broadcast(held.size.fixed for held in self._buffers)

    def optimizer_elements(self, parameter: TracedParameter) -> int:
        """Return all elements."""
        return parameter.elements

    def updated(self) -> None:
        """Leave the gradients: ``zero_grad`` of that time filled them with zeros."""


def _pieces(sizes: Iterable[float], first: float, later: float) -> list[float]:
    """Join sizes until a piece has a limit. Source: ``compute_bucket_assignment_by_size``."""
    pieces: list[float] = []
    is_full = True
    for size in sizes:
        if is_full:
            pieces.append(0.0)
        pieces[-1] += size
        is_full = pieces[-1] >= (first if len(pieces) == 1 else later)
    return pieces
