"""ENGINE: the data of a run on one rank: step after step, over all of its sources.

::

    sources.py   what a person bound -> samples by index, a stream of samples, or ready batches
    track.py     one source, epoch after epoch; functions are called here
    planned.py, streamed.py   one epoch, cut into the steps of this rank (cut.py says how)
    data.py      all sources together: the same steps on every rank, batches on the device
    position.py  where the next step begins, between runs

Every rank takes the same number of steps of an epoch. Where all know how many they have, they
agree on the fewest when an epoch begins; else they vote at each step.

Of several sources the shortest ends the epoch of all. A run of so many steps is not a matter of
epochs: there each source begins anew at its own end, as two loaders in ``itertools.cycle`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.agreement import Agreement
from fsdp_magic.engine.batches import sample_count, to_device
from fsdp_magic.engine.cut import Cut
from fsdp_magic.engine.position import Mark, Position
from fsdp_magic.engine.track import Track

CountLabels = Callable[[Any], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """What one rank takes in one step.

    Attributes:
        batches: one per micro-step, on the device.
        counts: samples of each; None where it has no number of samples.
        labels: what ``count_labels`` said of each before it went to the device.
        epoch: the epoch they belong to; of several sources, the first one's.
        ends_epoch: whether this is the epoch's last step; None: not known yet.
    """

    batches: list[Any]
    counts: list[int | None]
    labels: list[int | None] = field(default_factory=list)
    epoch: int
    ends_epoch: bool | None = None


class _Paced:
    """A track that takes as many steps of an epoch as all ranks can.

    Args:
        track: this rank's.
        agreement: with the other ranks.
    """

    def __init__(self, track: Track, agreement: Agreement) -> None:
        self.track = track
        self._agreement = agreement
        self._taken = 0
        self.full, self.left = agreement.fewest([track.reader.full, track.reader.left])

    def take(self) -> list[Any] | None:
        """Return the next step's micro-batches; None if not all ranks have one in this epoch."""
        if self.left == 0:
            return None
        batches = self.track.take()
        if self.left is None:
            return batches if self._agreement.all_have(batches is not None) else None
        assert batches is not None, "the data holds less than its length says"
        return batches

    def commit(self) -> None:
        """Move past the step that was taken last."""
        self.track.commit()
        self._taken += 1
        self.left = None if self.left is None else self.left - 1

    def turn(self) -> None:
        """Begin the next epoch."""
        self.track.turn()
        self._taken = 0
        self.left = self.full
        if not self.track.has_constant_length:
            reader = self.track.reader
            self.full, self.left = self._agreement.fewest([reader.full, reader.left])

    def check_end(self) -> None:
        """Raise if the epoch is over before it had a step: a run would turn epochs for ever.

        Raises:
            FsdpError: saying what to bind instead.
        """
        if self._taken == 0 and not self.track.begins_anew:
            raise FsdpError(
                "the data is at its end, and an iterator can be read only once; bind it anew, or "
                "pass the function that makes it"
            )
        if self._taken == 0 and self.track.is_at_beginning:
            raise FsdpError(
                "an epoch of the data does not fill a step on every rank; give it more batches, "
                "or lower --accumulate"
            )


class Data:
    """The data of one run on one rank.

    Collective: every rank must make its own.

    Args:
        sources: what a person bound; of several, a batch is a tuple.
        cut: how each is cut.
        goes_round: whether each source begins anew at its own end, for ``--steps``; if not, the
            shortest ends the epoch of all.
        epochs: epochs to read; None: the caller counts steps.
        device: where batches go.
        position: where to begin; advanced by ``commit``.
        agreement: with the other ranks.
        count_labels: called on each batch before it goes to the device.

    Attributes:
        steps_per_epoch: of all ranks; None if it is not known, or differs by epoch.
        micro_batch_size: None if batches come ready-made, or sources differ.
        accumulate: micro-batches per step.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        *,
        cut: Cut,
        goes_round: bool,
        epochs: int | None,
        device: torch.device,
        position: Position,
        agreement: Agreement,
        count_labels: CountLabels | None = None,
    ) -> None:
        self._device = device
        self._count_labels = count_labels
        self._goes_round = goes_round
        self._position = position
        self._before: Mark | None = None
        tracks = [Track(each, cut=cut, cursor=position.cursor(each)) for each in sources]
        self._tracks = [_Paced(track, agreement) for track in tracks]
        self.accumulate = _same_accumulation(tracks)
        sizes = {track.reader.micro_batch_size for track in tracks}
        self.micro_batch_size = sizes.pop() if len(sizes) == 1 else None
        self.steps_per_epoch = self._count_steps()
        self._epochs_left = epochs if self.steps_per_epoch is None else None
        if (epochs or 1) > 1 and not all(track.begins_anew for track in tracks):
            raise FsdpError(
                f"--epochs {epochs} reads the data {epochs} times, and an iterator can be read "
                "only once; pass the function that makes it"
            )

    @property
    def notes(self) -> list[str]:
        """Sentences a person should read; some come only when an epoch ends."""
        return list(dict.fromkeys(n for paced in self._tracks for n in paced.track.notes))

    @property
    def tracks(self) -> list[Track]:
        """Its sources."""
        return [paced.track for paced in self._tracks]

    def take(self) -> StepBatches | None:
        """Return the next step's micro-batches; None if the data is at its end.

        Collective: every rank must call this.
        """
        self._before = self._position.mark()
        parts = self._round() if self._goes_round else self._together()
        if parts is None:
            return None
        batches = parts[0] if len(parts) == 1 else [tuple(each) for each in zip(*parts)]
        count = self._count_labels
        return StepBatches(
            batches=[to_device(batch, self._device) for batch in batches],
            counts=[sample_count(batch) for batch in batches],
            labels=[None if count is None else count(batch) for batch in batches],
            epoch=self._tracks[0].track.epoch,
            ends_epoch=self._ends_epoch(),
        )

    def commit(self) -> None:
        """Count the step that was taken last; without this its batches come again."""
        for paced in self._tracks:
            paced.commit()
        self._before = None

    def undo(self) -> None:
        """Take back that batches were taken, also where that began a new epoch; ends the run.

        A rank that failed right after its step has not begun the epoch that its peers have.
        """
        if self._before is not None:
            self._position.back(self._before)

    def close(self) -> None:
        """End the worker processes of this run; the position stays."""
        for paced in self._tracks:
            paced.track.close()

    def _together(self) -> list[list[Any]] | None:
        """Return the next step of every source; where one ends, all begin the next epoch."""
        parts = self._next_of_all()
        if parts is not None:
            return parts
        for paced in self._tracks:
            paced.check_end()
        if not all(paced.track.begins_anew for paced in self._tracks):
            return None
        for paced in self._tracks:
            paced.turn()
        if self._epochs_left is not None:
            self._epochs_left -= 1
            if self._epochs_left == 0:
                return None
        return self._together()

    def _next_of_all(self) -> list[list[Any]] | None:
        parts = []
        for paced in self._tracks:
            part = paced.take()
            if part is None:
                return None
            parts.append(part)
        return parts

    def _round(self) -> list[list[Any]] | None:
        """Return the next step of every source; each begins anew at its own end."""
        parts = []
        for paced in self._tracks:
            part = paced.take()
            if part is None:
                paced.check_end()
                if not paced.track.begins_anew:
                    return None
                paced.turn()
                part = paced.take()
                if part is None:
                    paced.check_end()
                    return None
            parts.append(part)
        return parts

    def _ends_epoch(self) -> bool | None:
        lefts = [paced.left for paced in self._tracks[: 1 if self._goes_round else None]]
        if 1 in lefts:
            return True
        return None if None in lefts else False

    def _count_steps(self) -> int | None:
        known = [p.full for p in self._tracks if p.track.has_constant_length]
        if len(known) < len(self._tracks) or None in known:
            return None
        return min(n for n in known if n is not None)


def _same_accumulation(tracks: Sequence[Track]) -> int:
    steps = sorted({track.reader.accumulate for track in tracks})
    if len(steps) > 1:
        raise FsdpError(
            "--global-batch-size needs the same micro-batch size of all data; add "
            "--micro-batch-size"
        )
    return steps[0]
