"""ENGINE: one epoch of samples found by index, as a plan of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine import tokens
from fsdp_magic.engine.cut import Cut, Step, place_in
from fsdp_magic.engine.position import Cursor, Place
from fsdp_magic.engine.sources import Samples

Plan = list[list[int]]
"""Micro-batches of indices."""


class PlannedReader:
    """Samples found by index.

    Args:
        place: where to begin.
        full: steps of a whole epoch.
        left: steps from the place on.
        accumulate: micro-batches per step.
        consumed: what all ranks take in a step, in the place's unit.
        micro_batch_size: None if it differs between batches.
        notes: sentences a person should read.
        read: () -> this rank's batches of the steps that are left.
        close: ends worker processes.
    """

    def __init__(
        self,
        place: Place,
        *,
        full: int,
        left: int,
        accumulate: int,
        consumed: int,
        micro_batch_size: int | None,
        notes: list[str],
        read: Callable[[], Iterator[Any]],
        close: Callable[[], None],
    ) -> None:
        self.full: int | None = full
        self.left: int | None = left
        self.micro_batch_size = micro_batch_size
        self.accumulate = accumulate
        self.notes = notes
        self.close = close
        self._remaining = left
        self._place = place
        self._consumed = consumed
        self._read = read
        self._batches: Iterator[Any] | None = None

    def take(self) -> Step | None:
        """Return the next step; None if no whole one is left."""
        if self._remaining == 0:
            return None
        if self._batches is None:
            self._batches = self._read()
        batches = [next(self._batches) for _ in range(self.accumulate)]
        self._remaining -= 1
        self.left = self._remaining
        self._place = replace(self._place, consumed=self._place.consumed + self._consumed)
        return Step(batches=batches, after=self._place)


def by_samples(kind: Samples, cut: Cut, cursor: Cursor) -> PlannedReader:
    """Return a reader of micro-batches of one size.

    Raises:
        FsdpError: if the data does not fill a step.
    """
    batch, place = cut.batch_of(kind), place_in(cursor, "samples")
    full, dropped = divmod(kind.length, batch.global_size)
    left = max(0, kind.length - place.consumed) // batch.global_size
    if kind.length == 0:
        raise FsdpError("the data is empty; bind data that holds samples")
    if full == 0:
        raise FsdpError(
            f"the data has {kind.length} samples and one step takes {batch.text()}; lower "
            "--micro-batch-size or --accumulate"
        )

    def read() -> Iterator[Any]:
        ordered = kind.order(cut.seed, place.epoch, cut.shuffle)
        starts = range(place.consumed, place.consumed + left * batch.global_size, batch.global_size)
        slices = batch.micro_batch_slices(cut.rank)
        plan = [ordered[start + a : start + b] for start in starts for a, b in slices]
        return kind.read(plan, cut.collate, cut.worker_seed(place.epoch))

    return PlannedReader(
        place,
        full=full,
        left=left,
        accumulate=batch.accumulate,
        consumed=batch.global_size,
        micro_batch_size=batch.micro_batch_size,
        notes=_dropped(full, dropped, kind.length),
        read=read,
        close=kind.close,
    )


def by_tokens(kind: Samples, cut: Cut, cursor: Cursor, *, most: int) -> PlannedReader:
    """Return a reader of batches of like length, ``most`` tokens each or less.

    Raises:
        FsdpError: if the data does not fill a step, or a sample is too long.
    """
    place = place_in(cursor, f"batches of {most} tokens")
    plan = _token_plan(kind, cut, place.epoch, most)
    per_step = cut.accumulate * cut.ranks
    full, dropped = divmod(len(plan), per_step)
    left = max(0, len(plan) - place.consumed) // per_step
    if full == 0:
        raise FsdpError(
            f"the data's {kind.length} samples make {len(plan)} batches of at most {most} tokens, "
            f"and one step takes {per_step}; lower --tokens-per-batch or --accumulate"
        )

    def read() -> Iterator[Any]:
        first = place.consumed + cut.rank * cut.accumulate
        starts = range(first, first + left * per_step, per_step)
        mine = [plan[start + part] for start in starts for part in range(cut.accumulate)]
        return kind.read(mine, cut.collate, cut.worker_seed(place.epoch))

    return PlannedReader(
        place,
        full=full,
        left=left,
        accumulate=cut.accumulate,
        consumed=per_step,
        micro_batch_size=None,
        notes=_dropped(full, sum(map(len, plan[full * per_step :])) if dropped else 0, kind.length),
        read=read,
        close=kind.close,
    )


def _token_plan(kind: Samples, cut: Cut, epoch: int, most: int) -> Plan:
    ordered = kind.order(cut.seed, epoch, cut.shuffle)
    fresh = [index for index in ordered if index not in kind.lengths]
    kind.lengths.update(tokens.sample_lengths(kind.dataset, fresh))
    return tokens.token_batches(
        ordered,
        kind.lengths,
        tokens=most,
        seed=cut.seed,
        epoch=epoch,
        shuffle=cut.shuffle,
    )


def _dropped(steps: int, samples: int, length: int) -> list[str]:
    if not samples:
        return []
    return [
        f"an epoch is {steps:,} steps; its last {samples:,} of {length:,} samples do not fill a "
        "step and are left out"
    ]
