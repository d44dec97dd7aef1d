"""What the tuner's panel shows: probes, plan, pick, and a table of strategies; data only, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TunerState = Literal["planning", "searching", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeView:
    """One size that was tried.

    Attributes:
        micro_batch_size: samples per rank per forward.
        fits: whether it ran on every rank, beneath the margin.
        peak_bytes: the most that was allocated on the rank nearest to its end; None: it ran out,
            and nobody knows.
        samples_per_second: of all ranks; None: not measured.
        why: why it does not fit, in a few words: ``out of memory on rank 1``; empty: it does.
    """

    micro_batch_size: int
    fits: bool
    peak_bytes: int | None = None
    samples_per_second: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRow:
    """One strategy of a table.

    Attributes:
        name: with what it adds: ``full_shard+bf16``.
        is_present: whether the model is spread so.
        micro_batch_size: the pick; 0: not even the smallest size fits; None: it is being searched,
            or ``failure`` says why there is none.
        samples_per_step: of all ranks, with that size; None: not known.
        samples_per_second: of all ranks, with that size; None: not measured.
        peak_bytes: with that size, on the rank nearest to its end; None: not measured.
        probes: how many sizes were tried.
        ended_by: what the next size met, or what ended the search: ``memory``, ``the data``,
            ``--max``, ``speed``.
        failure: why nothing was found; empty: something was.
        is_best: whether it is the row to take: the largest pick, or the fastest.
    """

    name: str
    is_present: bool = False
    micro_batch_size: int | None = None
    samples_per_step: int | None = None
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    probes: int = 0
    ended_by: str = ""
    failure: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerView:
    """A search as it is shown, while it goes on and at its end.

    Attributes:
        state: where it is.
        objective: ``memory``: the largest size; ``throughput``: the fastest.
        strategy: the one that the chart is of.
        probes: of that strategy, in the order in which they ran.
        trying: the size of the probe under way; None: none is.
        planned: (size, predicted peak in bytes) by size; empty: there is no plan.
        capacity_bytes: what tensors may take on the rank with least; None: not known yet.
        margin: the share of the device that stays free, 0 to 1.
        pick: the size found; while it searches, the largest that fits so far; None: none yet.
        most: the largest size that the data or ``--max`` allow; None: no end is known.
        accumulate: micro-batches per step with the pick.
        ranks: in the world.
        ended_by: a sentence that says what ended the search; empty: it goes on.
        rows: the table, where strategies were asked for; the chart is of the last one searched.
        pending: names of strategies that are still to come.
        seconds: that it took so far.
        notes: sentences a person should read.
        stamp: when it was drawn, as text.
    """

    state: TunerState
    objective: Literal["memory", "throughput"]
    strategy: str
    probes: Sequence[ProbeView] = ()
    trying: int | None = None
    planned: Sequence[tuple[int, int]] = ()
    capacity_bytes: int | None = None
    margin: float = 0.05
    pick: int | None = None
    most: int | None = None
    accumulate: int = 1
    ranks: int = 1
    ended_by: str = ""
    rows: Sequence[TunedRow] = ()
    pending: Sequence[str] = ()
    seconds: float = 0.0
    notes: Sequence[str] = ()
    stamp: str = ""
