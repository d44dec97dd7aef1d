"""KERNEL: engines are asked for each strategy in turn, and have everything as before at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from fsdp_magic.core.comparison import (
    WARM_UP_STEPS,
    CompareReport,
    CompareRequest,
    PutBackRequest,
    SetAsideReport,
    SetAsideRequest,
)
from fsdp_magic.core.errors import CellFailedError, OutOfMemoryOnRankError
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.specs import CompareSpec
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.notebook import display
from fsdp_magic.notebook.comparison import Compared, Comparison
from fsdp_magic.notebook.engines import Engines
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.screen import Nowhere


def compare_on(
    engines: Engines, request: TrainRequest, spec: CompareSpec, *, world_size: int, show: bool
) -> Comparison:
    """Run the last training cell under each strategy, and show the table as it grows.

    Args:
        engines: to ask.
        request: of the cell's last run.
        spec: which strategies, and for how long.
        world_size: ranks there are.
        show: show the table.

    Raises:
        UsageError: if two strategies are one for these models.
        CellFailedError: if the cell failed otherwise than for want of memory; everything is as
            before.
        KeyboardInterrupt: if it was interrupted; everything is as before.
    """
    drawn = display.Panel()
    everybody = range(world_size)
    with set_aside(engines, everybody) as aside:
        built, on_host = aside.specs, aside.ranks_on_host
        variants = spec.variants(built, world_size=world_size, ranks_on_host=on_host)
        comparison = Comparison(variants, built, steps=spec.steps, world_size=world_size)
        for variant in variants:
            asked = _request(request, variant, steps=spec.steps)
            compared = _compared(engines, dict.fromkeys(everybody, asked), variant.name)
            present = all(variant.applied(each) == each for each in built)
            comparison.add(replace(compared, is_present=present))
            if show and comparison.pending:
                drawn.draw(*comparison.last_frame, final=False)
    if show:
        drawn.draw(*comparison.last_frame, final=True)
        display.mark_shown(comparison)
    return comparison


def set_aside(engines: Engines, ranks: Iterable[int]) -> AbstractContextManager[SetAsideReport]:
    """Have the models set aside inside, and everything as before afterwards."""
    return kept(engines, "set_aside", dict.fromkeys(ranks, SetAsideRequest()))


@contextmanager
def kept(engines: Engines, verb: str, requests: Mapping[int, Any]) -> Iterator[Any]:
    """Have ranks keep what steps change inside, and everything as before afterwards.

    Args:
        engines: to ask.
        verb: how they keep it: ``set_aside`` or ``hold``.
        requests: of that verb, by rank.

    Yields:
        The report of rank 0.
    """
    ranks = list(requests)
    try:
        replies, _ = engines.ask(verb, requests, screen=Nowhere())
        yield replies[0].report
    finally:
        if engines.broken is None:
            engines.ask("put_back", dict.fromkeys(ranks, PutBackRequest()), screen=Nowhere())


def _request(request: TrainRequest, variant: Variant, *, steps: int) -> CompareRequest:
    """Return what is asked of a rank: the cell with its options, for so many steps."""
    spec = replace(
        request.spec,
        steps=steps + WARM_UP_STEPS,
        epochs=None,
        eval_every=None,
        eval_data=None,
        snapshot_every=None,
        trial=False,
        resume=False,
    )
    return CompareRequest(code=request.code, name=request.name, spec=spec, variant=variant)


def _compared(engines: Engines, requests: dict[int, CompareRequest], name: str) -> Compared:
    """Run the cell under one strategy; one that does not fit, or is refused, is a row too."""
    spec = requests[0].spec
    try:
        replies, _ = engines.ask("compare", requests, screen=Nowhere(), timeout=spec.timeout)
    except OutOfMemoryOnRankError as error:
        return Compared(name=name, failure=f"out of memory: {str(error).splitlines()[0]}")
    except CellFailedError as error:
        if not error.is_refusal:
            raise
        return Compared(name=name, failure=str(error).splitlines()[0])
    reports: list[CompareReport] = [replies[rank].report for rank in sorted(replies)]
    run, per_step = measured(reports, accumulate=spec.accumulate)
    samples = run.samples_per_step
    idle_bytes = tuple(report.idle_bytes for report in reports)
    return Compared(
        name=name,
        losses=tuple(run.losses),
        seconds_per_step=per_step,
        samples_per_second=None if per_step is None or not samples else samples / per_step,
        peak_bytes=tuple(
            None if peak is None else max(0, peak - idle)
            for peak, idle in zip(run.peak_bytes, idle_bytes, strict=True)
        ),
        peak_memory=tuple(
            None if rank.peak_memory is None else _beyond(idle, rank.peak_memory)
            for rank, idle in zip(run.ranks, idle_bytes, strict=True)
        ),
        idle_bytes=idle_bytes,
    )


def measured(reports: Sequence[CompareReport], *, accumulate: int) -> tuple[Run, float | None]:
    """Return what the ranks' steps were as one run, and the seconds of one that was measured."""
    run = Run(run_id=0, world_size=len(reports), accumulate=accumulate)
    run.finish([report.run for report in reports])
    count = min(report.measured_steps for report in reports)
    seconds = max((r.seconds for r in reports if r.seconds is not None), default=None)
    return run, None if seconds is None or not count else seconds / count


def _beyond(idle_bytes: int, memory: MemorySample) -> MemorySample:
    """Return memory without what the process held anyway."""
    return replace(
        memory,
        allocated_bytes=max(0, memory.allocated_bytes - idle_bytes),
        peak_allocated_bytes=max(0, memory.peak_allocated_bytes - idle_bytes),
    )
