"""Strategies whose ranks hold parameters and gradients whole: ``ddp`` and ``zero1``; pure.

What they do is in ``engine/parallel/{whole_model,gradient_buckets,zero1,row_gathering}.py``. The
first step of a run reduces after backward, since nobody knows yet in which order gradients arrive;
later ones while the last backward runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.core.planning.gradient_buckets import BUCKET_BYTES, BucketReduction, buckets_of
from fsdp_magic.core.planning.overlay import Overlay, Setting
from fsdp_magic.core.planning.step_trace import Reached, StepTrace, TracedParameter


class WholeOverlay(Overlay):
    """``ddp``, and ``zero1`` which cuts the optimizer's state."""

    def __init__(self, trace: StepTrace, setting: Setting) -> None:
        super().__init__(trace, setting)
        self._trained = [p for p in trace.parameters.values() if p.trained]
        self._reduction: BucketReduction | None = None

    def begin(self) -> None:
        """Take whole parameters."""
        for name, p in self.trace.parameters.items():
            self.ledger.take(("parameter", name), p.bytes, "parameter", place=name)

    def passes(self, reached: Reached, *, is_last: bool) -> None:
        """Take gradients as they come, and reduce them."""
        if reached.mark == "backward" and is_last and self.step > 1:
            self._reduction = self._new_reduction(self._arriving())
        if reached.mark != "gradient":
            return
        key, p = ("gradient", reached.name), self.trace.parameters[reached.name]
        if not self.ledger.holds(key):
            self.ledger.take(key, p.bytes, "gradient", place=reached.name)
        if self._reduction is not None:
            self._reduction.arrived(reached.name)

    def reduce(self) -> None:
        """Reduce what is left."""
        self.ledger.enter(f"step {self.step}: reduction")
        reduction = self._reduction or self._new_reduction(self._trained[::-1])
        self._reduction = None
        reduction.finish()

    def _new_reduction(self, parameters: Sequence[TracedParameter]) -> BucketReduction:
        order = self._order()
        present = [p for p in parameters if p.name in order]
        return BucketReduction(self.ledger, present, number=self.step)

    def _arriving(self) -> list[TracedParameter]:
        """Return the trained parameters in the order in which their gradients arrive."""
        return [p for n in self._order() if (p := self.trace.parameters[n]).trained]

    def _order(self) -> dict[str, None]:
        marks = (e for e in self.trace.micro_step if isinstance(e, Reached))
        return dict.fromkeys(e.name for e in marks if e.mark == "gradient")

    def optimizer_elements(self, parameter: TracedParameter) -> int:
        """Return all elements, or those of this rank's shard under ``zero1``."""
        if self.setting.strategy == "zero1":
            return parameter.rows_of(self.setting.world_size)
        return parameter.elements

    def updated(self) -> None:
        """Gather what other ranks have updated, and free the gradients."""
        if self.setting.strategy == "zero1":
            for number, bucket in enumerate(buckets_of([p for p in self._trained if p.has_rows])):
                self._gather_rows(number, bucket)
        for p in self._trained:
            self.ledger.give_back(("gradient", p.name))

    def _gather_rows(self, number: int, bucket: Sequence[TracedParameter]) -> None:
        """Bring the rows of a bucket's parameters together.

        Source: ``gather_rows`` of engine/parallel/row_gathering.py.
        """
        ledger, ranks, is_large = (
            self.ledger,
            self.setting.world_size,
            bucket[0].bytes >= BUCKET_BYTES,
        )
        if is_large and bucket[0].shape[0] % ranks:
            return  # sent rank by rank, into place
        size = sum(p.rows_of(ranks) * ranks * p.element_bytes for p in bucket)
        key = ("rows gathered together", self.step, number)
        if not is_large:
            ledger.take(key, size, "communication", place=key[0])
        if self.setting.backend == "gloo":
            copied = ("gloo's all-gather copy", self.step, number)
            ledger.take(copied, size, "communication", place=copied[0])
            ledger.give_back(copied)
        ledger.give_back(key)
