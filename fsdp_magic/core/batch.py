"""How a global batch is cut: micro × accumulation × data-parallel = global; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.errors import UsageError


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


def accumulation(global_size: int, *, micro_batch_size: int, data_parallel_size: int) -> int:
    """Return the micro-batches per step that make a global batch.

    Raises:
        UsageError: if none do; it names the nearest sizes that work.
    """
    one = GlobalBatch(
        micro_batch_size=micro_batch_size, accumulate=1, data_parallel_size=data_parallel_size
    )
    steps, left = divmod(global_size, one.global_size)
    if left == 0:
        return steps
    nearest = [str(n * one.global_size) for n in (steps, steps + 1) if n]
    raise UsageError(
        f"--global-batch-size {global_size} is no multiple of {one.text()}; give "
        f"{' or '.join(nearest)}, or another --micro-batch-size"
    )
