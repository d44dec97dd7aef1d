"""A ranking of strategies by how long a step would take at the speeds of the data sheets; pure.

It is a ranking and no promise of seconds: no card reaches its data sheet, and what a step really
takes depends on kernels, batches and hosts. Three things take time: computing (operations over
the card's speed) or moving memory (bytes that operators read and write over its bandwidth), of
which the longer counts; and moving bytes between cards and to the host. These are added in full,
as if nothing were sent while the card computes: strategies overlap the two, each as well as its
model lets it, so that one with less to send is not behind one with more.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model
for multicore architectures", Communications of the ACM 52(4), 2009; bytes of ring collectives:
P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
Journal of Parallel and Distributed Computing 69(2), 2009; of ZeRO: S. Rajbhandari et al., "ZeRO:
memory optimizations toward training trillion parameter models", SC20, section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_magic.core.planning.cards import Card
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.step_trace import StepTrace

Limit = Literal["computing", "the card's memory", "the link between cards", "the link to the host"]
_TERA, _GIGA = 1e12, 1e9
_REDUCED_BYTES = 4
"""Gradients are reduced in float32 under every precision."""
_ADAMW_PASSES = 7
"""Reads of parameter, gradient and two moments, writes of parameter and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that leave a rank in one step.

    Attributes:
        link_bytes: to other ranks.
        host_bytes: to the host's memory and back, the larger of the two directions.
    """

    link_bytes: float
    host_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a step of a rank takes by data sheets, with nothing overlapped.

    Attributes:
        seconds_per_sample: what the ranking is by.
        limit: what takes longest.
        micro_batch_size: samples of a forward it was taken at.
    """

    seconds_per_sample: float
    limit: Limit
    micro_batch_size: int


def traffic_of(trace: StepTrace, setting: Setting) -> Traffic:
    """Return the bytes that one rank sends in a step."""
    trained = [p for p in trace.parameters.values() if p.trained]
    reduced = float(sum(p.elements for p in trained) * _REDUCED_BYTES)
    made = float(sum(p.elements * p.element_bytes for p in trained))
    gathered = float(sum(p.elements * p.compute_bytes for p in trace.parameters.values()))
    micro_steps = setting.accumulate
    is_whole = setting.strategy in ("ddp", "zero1")
    sync = setting.accumulate_sync or ("last" if is_whole else "every")
    reductions = micro_steps if sync == "every" else 1
    world = setting.world_size
    if setting.strategy == "ddp":
        return Traffic(link_bytes=2 * _others(world) * reduced * reductions)
    if setting.strategy == "zero1":
        return Traffic(link_bytes=_others(world) * (2 * reduced * reductions + made))
    ranks = setting.shard_size or world
    gathers = 1 if setting.strategy == "shard_grad_op" else 2
    link = _others(ranks) * (gathered * gathers * micro_steps + reduced * reductions)
    if ranks < world:
        link += 2 * _others(world // ranks) * reduced / ranks
    if not setting.cpu_offload:
        return Traffic(link_bytes=link)
    host = max(gathered * gathers * micro_steps, reduced) / ranks
    return Traffic(link_bytes=link, host_bytes=host)


def pace_of(
    trace: StepTrace, setting: Setting, card: Card | None, *, micro_batch_size: int
) -> Pace | None:
    """Return how long a step takes by data sheets; None where they are not known.

    Args:
        trace: of one process.
        setting: how it is spread.
        card: whose speeds count; None: they are not known.
        micro_batch_size: samples of a rank's forward.
    """
    flops = trace.flops.at(micro_batch_size) * setting.accumulate
    if card is None or not flops or not micro_batch_size:
        return None
    moved = trace.moved.at(micro_batch_size) * setting.accumulate
    moved += _ADAMW_PASSES * _optimizer_bytes(trace, setting)
    traffic = traffic_of(trace, setting)
    seconds: dict[Limit, float] = {
        "computing": flops / (card.tflops(trace.precision) * _TERA),
        "the card's memory": moved / (card.memory_gb_per_second * _GIGA),
        "the link between cards": traffic.link_bytes / (card.link_gb_per_second * _GIGA),
        "the link to the host": traffic.host_bytes / (card.host_gb_per_second * _GIGA),
    }
    limit = max(seconds, key=seconds.__getitem__)
    on_card = max(seconds["computing"], seconds["the card's memory"])
    total = on_card + seconds["the link between cards"] + seconds["the link to the host"]
    return Pace(
        seconds_per_sample=total / (micro_batch_size * setting.accumulate),
        limit=limit,
        micro_batch_size=micro_batch_size,
    )


def _others(ranks: int) -> float:
    """Return the share of a buffer that a ring moves over each rank."""
    return (ranks - 1) / ranks


def _optimizer_bytes(trace: StepTrace, setting: Setting) -> float:
    """Return the bytes of the parameters that the optimizer of a rank's card updates."""
    if setting.cpu_offload:
        return 0.0
    ranks = 1 if setting.strategy == "ddp" else setting.shard_size or setting.world_size
    trained = (p for p in trace.parameters.values() if p.trained)
    return float(sum(p.local_elements(ranks) * p.element_bytes for p in trained))
