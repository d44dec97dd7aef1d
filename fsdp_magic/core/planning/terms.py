"""Every term of a planned figure: its name, its bytes, and where it is from; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fsdp_magic.core.planning.allocator import reserved_peak
from fsdp_magic.core.planning.device import Device
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.peak_parts import PeakPart
from fsdp_magic.core.planning.step_trace import Kind
from fsdp_magic.core.units import GIB

USABLE, PEAK = "usable by tensors", "peak, allocated"

_FSDP = "torch/distributed/fsdp/_fully_shard"
SOURCES: Mapping[Kind, str] = {
    "parameter": "elements on this rank times their bytes as the model is made; dim 0 is cut as "
    f"torch.chunk does ({_FSDP}/_fsdp_param.py)",
    "gradient": "as the parameters, from when backward has made them until the optimizer has "
    "stepped",
    "optimizer": "state that the optimizer's own step() made, traced, an element of this rank",
    "activation": "storages that the traced forward made and autograd or the cell still holds",
    "temporary": "storages that the traced backward, or the optimizer, needs for a moment",
    "gathered": f"whole parameters of the units in use ({_FSDP}/_fsdp_param_group.py)",
    "communication": f"what collectives read and write ({_FSDP}/_fsdp_collectives.py); of buckets "
    "of gradients as many as there may be at once: one that is reduced early is gone by then",
    "input": "the tensors of the batches of all micro-steps, which are read as a step begins",
    "buffer": "the model's buffers, whole on every rank",
}
_NAMES: Mapping[Kind, str] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "activation": "activations",
    "temporary": "temporary",
    "gathered": "gathered parameters",
    "communication": "communication",
    "input": "batches of a step",
    "buffer": "buffers",
}


class Term(NamedTuple):
    """One term of a figure: of what, how much, and where the number is from."""

    name: str
    bytes: int
    source: str


class Terms(tuple[Term, ...]):
    """Every term of a figure; shown as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        wide = max(len(term.name) for term in self)
        return "\n".join(
            f"{term.name:{wide}}  {term.bytes / GIB:>9.3f} GiB  {term.source}" for term in self
        )


def terms_of(
    ledger: Ledger, parts: Sequence[PeakPart], device: Device, *, micro_batch_size: int, phase: str
) -> Terms:
    """Return every term of a peak and of what it has to fit in.

    First what is usable, then what the peak is made of, then what the allocator adds.

    Args:
        ledger: what a rank takes and gives back.
        parts: what the peak is made of.
        device: what it has to fit in.
        micro_batch_size: samples of a rank's forward.
        phase: in which the peak is.
    """
    held = [
        Term(f"{_NAMES[kind]}{f', {place}' if place else ''}", size, SOURCES[kind])
        for kind, place, size in parts
    ]
    peak = Term(
        PEAK,
        sum(part.bytes for part in parts),
        f"the sum, in {phase}; one trace at two batch sizes gives it for every size",
    )
    beyond = _reserved(ledger, device, micro_batch_size, peak.bytes)
    return Terms((*_device_terms(device), *held, peak, *beyond))


def _device_terms(device: Device) -> tuple[Term, ...]:
    capacity = device.card.memory_source if device.card else "as given"
    if device.kind == "cpu":
        return (Term(USABLE, device.usable_bytes, "the limit of a CPU engine"),)
    return (
        Term("capacity", device.capacity_bytes, capacity),
        Term(
            "CUDA context, libraries, kernels",
            -device.context_bytes,
            "--context-memory; its default is 23.65 - 22.76 - 0.02 GiB, of the out-of-memory "
            "message in huggingface.co/blog/pytorch-fsdp",
        ),
        Term(
            "NCCL's channels",
            -device.communication_bytes,
            "--nccl-memory; its default is 24 channels of 12 MiB, of github.com/NVIDIA/nccl "
            "issue 1685; one rank needs none",
        ),
        Term(USABLE, device.usable_bytes, "what is left"),
    )


def _reserved(
    ledger: Ledger, device: Device, micro_batch_size: int, peak_bytes: int
) -> tuple[Term, ...]:
    """Return what the caching allocator reserves beyond the peak, where it fits at all."""
    if device.kind == "cpu":
        return ()
    reserved = reserved_peak(ledger, micro_batch_size, device.usable_bytes)
    if reserved is None:
        return ()
    source = (
        "rounding, fragmentation, and what is kept until something needs it: replayed through a "
        "model of c10's CUDACachingAllocator"
    )
    return (Term("reserved beyond it", reserved - peak_bytes, source),)
