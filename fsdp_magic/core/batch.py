"""How a global batch is cut: micro × accumulation × data-parallel = global; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of one optimizer step.

    Attributes:
        micro_batch_size: samples per rank per forward; 1 where batches come ready-made.
        accumulate: micro-batches per step.
        data_parallel_size: ranks that share the batch.
    """

    micro_batch_size: int
    accumulate: int
    data_parallel_size: int

    @property
    def rank_size(self) -> int:
        """Samples of one rank in a step."""
        return self.micro_batch_size * self.accumulate

    @property
    def global_size(self) -> int:
        """Samples of all ranks in a step."""
        return self.rank_size * self.data_parallel_size

    def micro_batch_slices(self, rank: int) -> list[tuple[int, int]]:
        """Return where each micro-batch of a rank begins and ends in the global batch."""
        size = self.micro_batch_size
        start = rank * self.rank_size
        return [(start + part * size, start + (part + 1) * size) for part in range(self.accumulate)]

    def text(self) -> str:
        """Return the sum as a person reads it: ``8 × 4 × 2 ranks = 64 samples``."""
        ranks = "1 rank" if self.data_parallel_size == 1 else f"{self.data_parallel_size} ranks"
        return f"{self.micro_batch_size} × {self.accumulate} × {ranks} = {self.global_size} samples"
