"""ENGINE: every sample of the data once, for evaluation.

Passes go through the data in its own order: pass n takes ``W * B`` samples (W ranks, B in a
micro-batch), of which rank r has the r-th B. The last pass may hold fewer, and leave ranks
without any: such a rank goes along with a batch that counts nothing, because a forward of a
sharded model is a collective. Every batch says where it starts in the data, so sorting what all
ranks collected by ``start`` puts the data's order together again.

Ready batches are numbered instead: in pass n rank r has batch ``n*W + r``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.agreement import Agreement
from fsdp_magic.engine.batches import sample_count, to_device
from fsdp_magic.engine.chain import Link
from fsdp_magic.engine.collating import Collate
from fsdp_magic.engine.cut import Cut, refuse_for_ready
from fsdp_magic.engine.sources import Kind, Ready, Samples, Stream, kind_of
from fsdp_magic.engine.track import called, is_function


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalBatch:
    """One forward pass of one rank.

    Attributes:
        batch: on the device.
        count: its samples; 0: it only goes along; None: it has no number of samples.
        start: its place in the data: of samples, the first one's index; else the batch's number.
    """

    batch: Any
    count: int | None
    start: int


class EvalBatches:
    """The passes of this rank over data; iterate once.

    Args:
        source: what the person bound; a function is called with epoch 0, or nothing.
        rank: this rank.
        world_size: of the ranks that divide the data.
        device: where batches go.
        agreement: with the other ranks.
        micro_batch_size: samples of a pass; None: a DataLoader's own, or the default.
        collate: samples -> batch; None: a DataLoader's own, or the default.
        seed: of samplers and streams that draw.

    Attributes:
        passes: how many there are; None: not known.
        micro_batch_size: samples of a full pass; None: batches come ready-made.

    Raises:
        FsdpError: if the source holds no data, or cannot be cut as asked.
    """

    def __init__(
        self,
        source: Any,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        agreement: Agreement,
        micro_batch_size: int | None = None,
        collate: Collate | None = None,
        seed: int = 0,
    ) -> None:
        self._kind: Kind = kind_of(called(source, seed, 0) if is_function(source) else source)
        self._rank, self._ranks = rank, world_size
        self._device = device
        self._agreement = agreement
        self._collate = collate
        self._seed = seed
        self._link: Link | None = None
        self.micro_batch_size: int | None = None
        self.passes: int | None = None
        if isinstance(self._kind, Ready):
            refuse_for_ready(
                Cut(
                    rank=rank,
                    ranks=world_size,
                    seed=seed,
                    micro_batch_size=micro_batch_size,
                    collate=collate,
                )
            )
            return
        self.micro_batch_size = micro_batch_size or self._kind.micro_batch_size
        if isinstance(self._kind, Samples):
            self.passes = -(-self._kind.length // self._together)

    def __iter__(self) -> Iterator[EvalBatch]:
        """Yield equally many batches on every rank.

        Collective: every rank must read to the end.
        """
        latest: EvalBatch | None = None
        parts = self._parts()
        while True:
            part = next(parts, None)
            # ranks may hold data of their own, and streams end when they end
            if not self._agreement.any_has(part is not None):
                break
            latest = part or self._going_along(latest)
            yield EvalBatch(
                batch=to_device(latest.batch, self._device), count=latest.count, start=latest.start
            )
        if latest is None:
            raise FsdpError("the data is empty; bind data that holds samples")

    def close(self) -> None:
        """End worker processes."""
        if isinstance(self._kind, Samples):
            self._kind.close()
        if self._link is not None:
            self._link.close()

    @property
    def _together(self) -> int:
        """Samples of all ranks in a pass."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size * self._ranks

    def _parts(self) -> Iterator[EvalBatch]:
        if isinstance(self._kind, Samples):
            return self._indexed(self._kind)
        if isinstance(self._kind, Stream):
            return self._streamed(self._kind)
        return self._ready(self._kind)

    def _indexed(self, kind: Samples) -> Iterator[EvalBatch]:
        assert self.micro_batch_size is not None
        size = self.micro_batch_size
        ordered = kind.order(self._seed, 0, False)
        starts = range(self._rank * size, len(ordered), self._together)
        plan = [ordered[start : start + size] for start in starts]
        counts = [len(indices) for indices in plan]
        if ordered and not plan:  # fewer samples than ranks: one to go along with
            starts, plan, counts = range(1), [ordered[:1]], [0]
        batches = kind.read(plan, self._collate, self._seed)
        for start, batch, count in zip(starts, batches, counts, strict=True):
            yield EvalBatch(batch=batch, count=count, start=start)

    def _streamed(self, kind: Stream) -> Iterator[EvalBatch]:
        assert self.micro_batch_size is not None
        size = self.micro_batch_size
        collate = self._collate or kind.collate
        self._link = link = kind.begin(self._seed, 0)
        passed = 0
        while True:
            samples, link = link.take(self._together)
            if not samples:
                return
            mine = samples[self._rank * size : (self._rank + 1) * size]
            start = passed + self._rank * size if mine else 0
            yield EvalBatch(batch=collate(mine or samples[:1]), count=len(mine), start=start)
            passed += len(samples)

    def _ready(self, kind: Ready) -> Iterator[EvalBatch]:
        """Yield ready batches; of those that ranks share, also an incomplete last round."""
        self._link = link = kind.begin(self._seed, 0, 0, 1)
        step = self._ranks if kind.shared else 1
        number = 0
        while True:
            together, link = link.take(step)
            if not together:
                return
            mine = self._rank if kind.shared else 0
            there = mine < len(together)
            batch = together[mine if there else 0]
            yield EvalBatch(
                batch=batch,
                count=sample_count(batch) if there else 0,
                start=number * self._ranks + self._rank if there else 0,
            )
            number += 1

    def _going_along(self, latest: EvalBatch | None) -> EvalBatch:
        """Return a batch that counts nothing.

        Raises:
            FsdpError: if this rank never had one.
        """
        if latest is None:
            raise FsdpError(
                f"the data of rank {self._rank} holds no batch, and every rank needs one for its "
                "forward; give each rank at least one"
            )
        return EvalBatch(batch=latest.batch, count=0, start=0)
