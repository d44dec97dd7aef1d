"""KERNEL: what one rank has reported of a training run."""

from __future__ import annotations

from fsdp_magic.core.telemetry import DeviceSample, MemorySample, StepRecords


class RankProgress:
    """What one rank has reported of a run.

    Attributes:
        losses: its share of each step's loss.
        grad_norms: the global norm of each step.
        samples, tokens: what it took in each step.
        sample_count, token_count: of all steps; tokens are None where batches have none.
        metrics: by name and step, its part: weight × value and weight, added up.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.samples: list[int] = []
        self.tokens: list[int] | None = []
        self.sample_count = 0
        self.token_count: int | None = 0
        self.metrics: dict[str, dict[int, tuple[float, float]]] = {}
        self.seconds = 0.0
        self.device_name = ""
        self.memory: MemorySample | None = None
        self.peak_memory: MemorySample | None = None
        self.activity = DeviceSample()
        self.mean_activity = DeviceSample()

    def add(self, records: StepRecords) -> None:
        """Take records; those that were there already are replaced."""
        self.losses[records.first :] = records.losses
        self.grad_norms[records.first :] = records.grad_norms
        self.sample_count -= sum(self.samples[records.first :])
        self.samples[records.first :] = records.samples
        self.sample_count += sum(records.samples)
        if records.tokens is None or self.tokens is None or self.token_count is None:
            self.tokens = self.token_count = None
        else:
            self.token_count -= sum(self.tokens[records.first :])
            self.tokens[records.first :] = records.tokens
            self.token_count += sum(records.tokens)
        for metric in records.metrics:
            parts = self.metrics.setdefault(metric.name, {})
            parts[metric.step] = (metric.total, metric.weight)

    def newest_step(self, name: str, *, before: int) -> int:
        """Return the last step before another that bound a metric; -1: none did."""
        steps = reversed(self.metrics.get(name, {}))
        return next((step for step in steps if step < before), -1)
