"""The overlay of each strategy; pure."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.overlay import Overlay, Setting, replay
from fsdp_magic.core.planning.sharded_overlay import ShardedOverlay
from fsdp_magic.core.planning.step_trace import StepTrace
from fsdp_magic.core.planning.whole_overlay import WholeOverlay

_OVERLAYS: Mapping[str, type[Overlay]] = {
    "full_shard": ShardedOverlay,
    "shard_grad_op": ShardedOverlay,
    "hybrid_shard": ShardedOverlay,
    "zero1": WholeOverlay,
    "ddp": WholeOverlay,
}


def ledger_of(trace: StepTrace, setting: Setting) -> Ledger:
    """Return what a rank takes and gives back over two steps of a trace under a strategy."""
    return replay(overlay_of(trace, setting))


def overlay_of(trace: StepTrace, setting: Setting) -> Overlay:
    """Return the overlay of a strategy, with nothing replayed yet."""
    return _OVERLAYS[setting.strategy](trace, setting)
