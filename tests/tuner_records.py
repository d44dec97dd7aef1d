"""Made-up searches for a batch size, as the panel shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp_magic.core.units import GIB
from fsdp_magic.panels.tuner_view import ProbeView, TunedRow, TunerView

CAPACITY = 80 * GIB


def planned_bytes(size: int) -> int:
    """What a model of the tests takes: 20.5 GiB and 2.3 GiB a sample."""
    return int((20.5 + 2.3 * size) * GIB)


def probe(size: int, **changes: Any) -> ProbeView:
    """A size that was tried; it fits where its memory stays beneath the margin."""
    peak = planned_bytes(size)
    fits = peak <= 0.95 * CAPACITY
    one = ProbeView(
        micro_batch_size=size,
        fits=fits,
        peak_bytes=peak if fits else None,
        samples_per_second=410 * size / (size + 6) if fits else None,
        why="" if fits else "out of memory on rank 1",
    )
    return replace(one, **changes)


def search(*sizes: int, state: Any = "searching", **changes: Any) -> TunerView:
    """A search that tried some sizes, with a plan."""
    probes = [probe(size) for size in sizes]
    one = TunerView(
        state=state,
        objective="memory",
        strategy="full_shard",
        probes=probes,
        planned=[(size, planned_bytes(size)) for size in (1, 8, 16, 24, 32)],
        capacity_bytes=CAPACITY,
        pick=max((p.micro_batch_size for p in probes if p.fits), default=None),
        accumulate=4,
        ranks=2,
        seconds=6.1,
        stamp="12:00:00",
    )
    return replace(one, **changes)


def tuned_rows(count: int = 6) -> Sequence[TunedRow]:
    """Strategies of a table, of which the last one takes most and the third did not run."""
    names = (
        *("ddp", "zero1", "shard_grad_op", "full_shard", "full_shard+activation_checkpointing"),
        *("full_shard+cpu_offload", "full_shard+bf16", "hybrid_shard"),
    )
    rows = [
        TunedRow(
            name=name,
            micro_batch_size=4 + 3 * number,
            samples_per_step=8 * (4 + 3 * number),
            samples_per_second=118.4 + number,
            peak_bytes=int((70 + number / 2) * GIB),
            probes=3 + number % 3,
            ended_by="memory",
            is_present=number == 3,
            is_best=number == count - 1,
        )
        for number, name in enumerate(names[:count])
    ]
    if count > 2:
        rows[2] = replace(rows[2], micro_batch_size=None, failure="ValueError: no such thing")
    return rows
