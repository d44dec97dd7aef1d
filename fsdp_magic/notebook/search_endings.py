"""KERNEL: what ended a search for a micro-batch size, in words."""

from __future__ import annotations

from fsdp_magic.core.errors import OutOfMemoryOnRankError
from fsdp_magic.core.specs import TrainSpec, TuneSpec
from fsdp_magic.notebook.probes import TunedStrategy


def ending_of(
    each: TunedStrategy, spec: TuneSpec, training: TrainSpec, *, most: int | None
) -> tuple[str, str]:
    """Return what ended a search, in a few words and as a sentence.

    Args:
        each: what was found.
        spec: what was asked for.
        training: the options of the steps.
        most: the largest size of which the data fill a step; None: not known.
    """
    pick = each.micro_batch_size or 0
    larger = [p for p in each.probes if p.micro_batch_size > pick]
    if spec.objective == "throughput" and pick and any(p.fits for p in larger):
        return "speed", "larger sizes are not faster"
    refused = [p for p in larger if not p.fits]
    if not refused:
        return _end_of_sizes(each, spec, training, most=most)
    first = min(refused, key=lambda p: p.micro_batch_size)
    size = f"{first.micro_batch_size:,}"
    if first.is_end_of_data:
        return "the data", f"the data fill no step of {size}"
    margin = spec.margin
    is_free = first.why.startswith("leaves")  # some, but not as much as is to stay free
    said = f"; --margin {margin:g} keeps {100 * margin:g} %" if margin and is_free else ""
    return "memory", f"{size} {first.why}{said}"


def _end_of_sizes(
    each: TunedStrategy, spec: TuneSpec, training: TrainSpec, *, most: int | None
) -> tuple[str, str]:
    if spec.max is not None and (most is None or spec.max < most):
        return "--max", f"--max {spec.max:,} ends the search"
    if training.global_batch_size is not None:
        return "the global batch", "it is a rank's whole part of the global batch"
    if most is None:
        return "no end", f"{each.sizes[-1]:,} is the largest size that is tried"
    return "the data", "the data fill no larger step"


def nothing_fits(
    each: TunedStrategy, *, refused: OutOfMemoryOnRankError | None, ranks: int
) -> OutOfMemoryOnRankError:
    """Return the error that says that not even the smallest size fits.

    Args:
        each: what was found.
        refused: how it ran out of memory; None: it ran, and left too little free.
        ranks: in the world.
    """
    size = f"{each.sizes[0]:,}"
    less = (
        "a strategy that holds less (%%fsdp_model --strategy full_shard), more ranks "
        f"(%fsdp_init -n {2 * ranks} --restart) or a smaller model"
    )
    if refused is not None:
        refused.add_line(f"Not even a micro-batch of {size} fits; try {less}")
        return refused
    return OutOfMemoryOnRankError(
        f"not even a micro-batch of {size} fits: {each.reason}; lower --margin, or try {less}",
        exceptions={},
    )
