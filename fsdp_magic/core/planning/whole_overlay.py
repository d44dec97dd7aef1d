"""Strategies whose ranks hold parameters and gradients whole: ``ddp`` and ``zero1``; pure.

What they do is in ``engine/parallel/{whole_model,gradient_buckets,zero1,casting}.py``.
"""

from __future__ import annotations

from fsdp_magic.core.planning.overlay import Overlay
from fsdp_magic.core.planning.step_trace import Reached, TracedParameter


class WholeOverlay(Overlay):
    """``ddp``, and ``zero1`` which cuts the optimizer's state."""

    def begin(self) -> None:
        """Take whole parameters."""
        for name, p in self.trace.parameters.items():
            self.ledger.take(("parameter", name), p.elements * p.element_bytes, "parameter")

    def passes(self, reached: Reached, *, is_last: bool) -> None:  # noqa: ARG002
        """Take gradients as they come."""
        if reached.mark == "gradient" and not self.ledger.holds(("gradient", reached.name)):
            p = self.trace.parameters[reached.name]
            key = ("gradient", reached.name)
            self.ledger.take(key, p.elements * p.element_bytes, "gradient", place=reached.name)

    def optimizer_elements(self, parameter: TracedParameter) -> int:
        """Return all elements, or those of this rank's shard under ``zero1``."""
        if self.setting.strategy == "zero1":
            return parameter.local_elements(self.setting.world_size)
        return parameter.elements

    def updated(self) -> None:
        """Free the gradients."""
        for key in self.ledger.held("gradient"):
            self.ledger.give_back(key)
