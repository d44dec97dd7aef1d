"""What an overlay says a rank takes is what FSDP2's own code takes there."""

from __future__ import annotations

import pytest

from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.planning.strategies import ledger_of
from fsdp_magic.engine.planning.fake_mode import PlanningMode
from fsdp_magic.engine.planning.tracing import trace_step
from tests.exact_plan import exact_peak, fake_group, spec_of
from tests.traced_model import NO_OPTIMIZER, SmallModel, program_of, some_or_nightly


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of units of a Linear
@some_or_nightly(
    ("strategy", ("full_shard", "shard_grad_op")),
    ("variant", (TraceVariant(), TraceVariant("bf16"), TraceVariant("bf16", "blocks"))),
    ("wrap", ("blocks", "size:2000")),
    ("ranks", (2, 8, 64)),
    default=(
        ("full_shard", TraceVariant("bf16", "blocks"), "blocks", 8),
        ("shard_grad_op", TraceVariant(), "size:2000", 2),
    ),
)
def test_an_overlay_takes_what_fsdp2_takes(
    strategy: str, variant: TraceVariant, wrap: str, ranks: int
) -> None:
    """The overlay of a trace, and FSDP2's own code on as many ranks."""
    with fake_group(ranks) as mesh:
        exact = exact_peak(
            lambda: program_of(SmallModel()),
            mesh,
            spec=spec_of(strategy, variant, wrap=wrap),
            samples=4,
        )
    with PlanningMode():
        trace = trace_step(
            program_of(SmallModel()), variant=variant, wraps=(wrap,), optimizer=NO_OPTIMIZER
        )
    ledger = ledger_of(trace, Setting(strategy=strategy, world_size=ranks, wrap=wrap))  # type: ignore[arg-type]
    assert ledger.peak(4) == pytest.approx(exact, rel=0.015)
