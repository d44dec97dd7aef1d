"""Gradients that every rank holds whole, reduced in buckets while backward runs; pure.

The same rules as those of ``engine/parallel/gradient_buckets.py``, told in bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.step_trace import TracedParameter
from fsdp_magic.core.units import MIB

BUCKET_BYTES = 4 * MIB
MOST_COPIED_BYTES = 2 * BUCKET_BYTES
"""Source: the constants of these names in engine/parallel/gradient_buckets.py."""


def buckets_of(parameters: Sequence[TracedParameter]) -> list[list[TracedParameter]]:
    """Return parameters in buckets, in the order in which the last of each is expected."""
    buckets: list[list[TracedParameter]] = []
    filling: dict[int, tuple[list[TracedParameter], int]] = {}
    for parameter in parameters:
        kind = parameter.element_bytes
        bucket, filled = filling.get(kind, ([], 0))
        if parameter.bytes >= BUCKET_BYTES:
            buckets.append([parameter])
            continue
        bucket.append(parameter)
        if filled + parameter.bytes < BUCKET_BYTES:
            filling[kind] = bucket, filled + parameter.bytes
        else:
            buckets.append(bucket)
            filling.pop(kind, None)
    return [*buckets, *(bucket for bucket, _ in filling.values())]


class BucketReduction:
    """The reduction of one step's gradients, in the memory that its copies take.

    A copy is given back when the reduction of its bucket has been waited for. That no bucket is
    done before it must be is what a rank has to reckon with: on a card the host runs ahead.

    Args:
        ledger: where it is written.
        parameters: in the order in which their gradients are expected.
        number: of the reduction.
    """

    def __init__(
        self, ledger: Ledger, parameters: Sequence[TracedParameter], *, number: int
    ) -> None:
        self._ledger = ledger
        self._buckets = buckets_of(parameters)
        self._bucket_of = {p.name: n for n, bucket in enumerate(self._buckets) for p in bucket}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._launched = 0
        self._under_way: deque[tuple[tuple[str, int, int], int]] = deque()
        self._number = number

    def arrived(self, name: str) -> None:
        """Note that a gradient is complete, and launch what can be launched now."""
        bucket = self._bucket_of.get(name)
        if bucket is None:
            return
        self._missing[bucket] -= 1
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            if not self._has_room():
                return
            self._launch()

    def finish(self) -> None:
        """Launch the rest and wait for all."""
        while self._launched < len(self._buckets):
            self._launch()
            while not self._has_room():
                self._land()
        while self._under_way:
            self._land()

    def _has_room(self) -> bool:
        return sum(size for _, size in self._under_way) < MOST_COPIED_BYTES

    def _land(self) -> None:
        key, _ = self._under_way.popleft()
        self._ledger.give_back(key)

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        key = ("bucket of gradients", self._number, self._launched)
        self._launched += 1
        size = 0
        if len(bucket) > 1:  # a large gradient is reduced where it is
            size = sum(p.bytes for p in bucket)
            self._ledger.take(key, size, "communication", place=key[0])
        self._under_way.append((key, size))
