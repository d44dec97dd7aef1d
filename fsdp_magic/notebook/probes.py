"""KERNEL: sizes that were tried, and what was found of them under one strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_magic.core.search import Predicted
from fsdp_magic.core.units import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One size that was tried: whole steps of it, on every rank.

    Attributes:
        micro_batch_size: samples per rank per forward.
        fits: whether it ran on every rank with the margin left free.
        peak_bytes: the most that was allocated, by rank; empty: memory ran out.
        load_bytes: the peak of the rank nearest to its end, as if it had the room of the rank with
            least; None: memory ran out.
        samples_per_second: of all ranks; None: not measured.
        seconds_per_step: None: not measured.
        samples_per_step: of all ranks; None: batches have no number of samples.
        why: why it does not fit; empty: it does.
        is_end_of_data: whether it was the data that had no step of it.
    """

    micro_batch_size: int
    fits: bool
    peak_bytes: tuple[int, ...] = ()
    load_bytes: int | None = None
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    samples_per_step: int | None = None
    why: str = ""
    is_end_of_data: bool = False

    @property
    def ran_out(self) -> bool:
        """Whether memory ran out on a rank; one that only left too little free may yet train."""
        return not self.fits and self.load_bytes is None and not self.is_end_of_data

    def __repr__(self) -> str:
        peak = f", peak {bytes_text(max(self.peak_bytes))}" if self.peak_bytes else ""
        return f"<micro-batch {self.micro_batch_size}: {self.why or 'fits'}{peak}>"


@dataclass(slots=True, kw_only=True)
class TunedStrategy:
    """What was found under one strategy.

    Attributes:
        name: of the strategy, with what it adds.
        is_present: whether the models are spread so.
        probes: in the order in which they ran.
        micro_batch_size: the pick, which has run; 0: none fits; None: not searched to its end.
        accumulate: micro-batches per step with the pick.
        ended_by: what ended the search, in a few words: ``memory``, ``the data``, ``--max``,
            ``the global batch``, ``speed``; ``no end``: nothing did.
        reason: the same as a sentence.
        failure: why there is nothing; empty: there is.
        sizes: that might have been tried, ascending.
        expected: the peak of any size, after what was measured; None: nothing is known.
    """

    name: str
    is_present: bool = False
    probes: list[Probe] = field(default_factory=list)
    micro_batch_size: int | None = None
    accumulate: int = 1
    ended_by: str = ""
    reason: str = ""
    failure: str = ""
    sizes: Sequence[int] = ()
    expected: Predicted | None = None

    @property
    def picked(self) -> Probe | None:
        """The probe of the pick."""
        for probe in reversed(self.probes):
            if probe.micro_batch_size == self.micro_batch_size and probe.fits:
                return probe
        return None

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks a second, with the pick; None: not measured."""
        return None if self.picked is None else self.picked.samples_per_second

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that was allocated with the pick, by rank."""
        return () if self.picked is None else self.picked.peak_bytes

    def __repr__(self) -> str:
        return f"<{self.name}: {self.failure or f'micro-batch {self.micro_batch_size}'}>"
