"""The options of ``%%fsdp_eval``; pure."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_magic.core.specs.data import DataSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSpec(DataSpec):
    """How a cell runs over data without gradients, every sample once."""
