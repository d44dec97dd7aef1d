"""KERNEL: a micro-batch size that ``%fsdp_tune`` found, and what training cells make of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_magic.core.specs import TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSize:
    """A size that is the default of training cells on the same data.

    Attributes:
        data: as typed.
        micro_batch_size: to take, as found or as chosen.
        fits: the largest that was seen to fit.
        accumulates: whether it was found in steps of several micro-batches.
        global_batch_size: that it is a part of, and that stays; None: nobody asked for one.
        samples: that one rank reads; None: nobody knows.
    """

    data: str | None
    micro_batch_size: int
    fits: int
    accumulates: bool = True
    global_batch_size: int | None = None
    samples: int | None = None

    def is_for(self, spec: TrainSpec) -> bool:
        """Return whether a training cell leaves its size to this one."""
        if spec.micro_batch_size or spec.tokens_per_batch:
            return False
        return spec.data is not None and spec.data == self.data

    def sized(self, spec: TrainSpec, *, ranks: int) -> tuple[TrainSpec, str]:
        """Return the options of a training cell with the size, and what to say of it.

        Args:
            spec: as typed.
            ranks: in the world.
        """
        kept, handed_on = self.global_batch_size, ""
        if kept is not None and spec.global_batch_size is None and spec.accumulate == 1:
            spec = replace(spec, global_batch_size=kept)
            handed_on = f", and --global-batch-size {kept:,} with it"
        size, accumulate, cut = self._cut(spec, ranks)
        note = (
            f"the micro-batch size is {size:,}, {cut or f'from %fsdp_tune{handed_on}'}; "
            "--micro-batch-size sets it"
        )
        if accumulate > 1 and not cut and not self.accumulates:
            note += (
                "; it was found in steps of one micro-batch, and several hold gradients as well: "
                "%fsdp_tune with the --accumulate of this run is sure"
            )
        return replace(spec, micro_batch_size=size), note

    def _cut(self, spec: TrainSpec, ranks: int) -> tuple[int, int, str]:
        """Return the size, micro-batches per step, and why it is smaller; nothing: it is not."""
        found, accumulate = self.micro_batch_size, spec.accumulate
        if spec.global_batch_size is not None:  # of which it must be a part
            share = spec.global_batch_size // (ranks if spec.data_sharding == "auto" else 1)
            parts = [b for b in range(1, min(found, share) + 1) if share % b == 0]
            size = max(parts, default=found)
            why = (
                f"the largest part of a rank's {share:,} within the {found:,} that %fsdp_tune found"
            )
            return size, share // size, why if size != found else ""
        if self.samples is not None and found * accumulate > self.samples:
            size = max(1, self.samples // accumulate)
            times = f"{accumulate:,} times" if accumulate > 1 else "once"
            why = f"as much of the {found:,} that %fsdp_tune found as the data fill {times}"
            return size, accumulate, why
        return found, accumulate, ""

    def known_to_fit(self, spec: TrainSpec, micro_batch_size: int | None) -> str:
        """Return what to say of a run that was out of memory; nothing: nothing is known of it.

        Args:
            spec: of the run.
            micro_batch_size: of its steps; None: batches of the data's own.
        """
        if micro_batch_size is None or spec.data != self.data:
            return ""
        if micro_batch_size > self.fits:
            return f"%fsdp_tune found that {self.fits:,} fits: --micro-batch-size {self.fits}."
        return (
            f"%fsdp_tune found that {self.fits:,} fits; more is held on the devices now, or the "
            "steps are not those that it tried."
        )
