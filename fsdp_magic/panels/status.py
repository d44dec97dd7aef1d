"""Every rank of a session: where it runs, how full it is, what it holds; pure.

This is the first thing that a person sees of a session. What is the same on all ranks is said
once, above; only what tells ranks apart is a column. Of many ranks three get a row, and a strip
shows all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_magic.core.telemetry import RankStatus
from fsdp_magic.core.units import MIB, UNKNOWN, bytes_text, ranks_text
from fsdp_magic.panels import many_ranks
from fsdp_magic.panels.activity import ActivityColumns
from fsdp_magic.panels.gauges import (
    Gauge,
    bar,
    capacity_text,
    full_bytes,
    legend,
    letters,
    measured,
    scale_text,
    unit_of,
)
from fsdp_magic.panels.parts import (
    FIRST,
    SMALL,
    MemoryUnit,
    card,
    cell,
    escape,
    head_cell,
    headline,
    number_cell,
    one_line,
    row,
    shortened,
    table,
    text_table,
)

_MOST_HOSTS = 16
_SIZES = ("used", "peak allocated")

_Words = Callable[[RankStatus], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """What there is to show of the ranks.

    Attributes:
        gauges: by rank.
        unit: of all sizes.
        places: heading and text of the columns in front of the bar.
        work: likewise, of those behind it.
        capacity: whether that is a column.
        activity: columns of what devices do.
    """

    gauges: list[Gauge]
    unit: MemoryUnit
    places: list[tuple[str, _Words]]
    work: list[tuple[str, _Words]]
    capacity: bool
    activity: ActivityColumns

    @classmethod
    def of(cls, ranks: Sequence[RankStatus]) -> _Table:
        """Return the columns that tell ranks apart."""
        gauges = measured([_gauge(rank) for rank in ranks])
        gpus = any(rank.device != "cpu" for rank in ranks)
        places: list[tuple[str, _Words]] = []
        places += [("host", _host)] if _differ(ranks, _host) else []
        places += [("device", _device)] if gpus else []
        places += [("name", _name)] if _differ(ranks, _name) else []
        places.append(("pid", lambda rank: str(rank.pid)))
        return cls(
            gauges=gauges,
            unit=unit_of(gauges),
            places=places,
            work=[("held", _work)] if _differ(ranks, _work) else [],
            capacity=len({rank.capacity_bytes for rank in ranks}) > 1,
            activity=ActivityColumns.of([rank.activity for rank in ranks]),
        )

    @property
    def size_heads(self) -> list[str]:
        """Headings of the columns of numbers."""
        capacity = ["capacity"] if self.capacity else []
        return [*_SIZES, *capacity, *self.activity.heads()]

    @property
    def memory_head(self) -> str:
        """Heading of the bars."""
        scale = scale_text(self.gauges) if self.is_used else ""
        return f"memory, {self.unit.name}" + (f", {scale}" if scale else "")

    @property
    def is_used(self) -> bool:
        """Whether there is anything to see in the bars."""
        return any(gauge.highest_bytes >= MIB for gauge in self.gauges)

    def sizes(self, rank: RankStatus) -> list[str]:
        """Return the numbers of a rank, as text."""
        memory = rank.memory
        sizes = [self.unit.text(n) for n in (memory.used_bytes, memory.peak_allocated_bytes)]
        sizes += [capacity_text(memory.capacity_bytes, self.unit)] if self.capacity else []
        return [*sizes, *self.activity.values(rank.activity)]


def html(ranks: Sequence[RankStatus], *, stamp: str) -> str:
    """Return what the ranks share, and a row for each.

    Args:
        ranks: in order.
        stamp: when they were asked, as text.
    """
    shown, by_rank = _Table.of(ranks), {rank.rank: rank for rank in ranks}
    largest = full_bytes(shown.gauges)
    rows = [
        row(
            cell(many_ranks.label_html(label), style=FIRST)
            + "".join(cell(escape(words(by_rank[gauge.rank]))) for _, words in shown.places)
            + cell(bar(gauge, unit=shown.unit, largest=largest), style="width:100%")
            + "".join(number_cell(size) for size in shown.sizes(by_rank[gauge.rank]))
            + "".join(cell(escape(words(by_rank[gauge.rank]))) for _, words in shown.work)
        )
        for gauge, label in many_ranks.shown(shown.gauges)
    ]

    def where(gauge: Gauge) -> str:
        return "".join(f" {words(by_rank[gauge.rank])}" for _, words in shown.places)

    content = (
        headline(_title(ranks), summary=_summary(ranks), stamp=stamp)
        + "".join(f'<div style="{SMALL}">{escape(line)} </div>' for line in _below(ranks, shown))
        + (f'<div style="margin:4px 0px">{legend()}</div>' if shown.is_used else "")
        + table(_head(shown), rows)
        + many_ranks.strip_html(shown.gauges, where=where)
    )
    return card(content, label="Session status")


def text(ranks: Sequence[RankStatus], *, stamp: str) -> str:
    """Return the same as text; see ``html``."""
    shown, by_rank = _Table.of(ranks), {rank.rank: rank for rank in ranks}
    largest = full_bytes(shown.gauges)
    places, work = [name for name, _ in shown.places], [name for name, _ in shown.work]
    lines = [["rank", *places, shown.memory_head, *work, *shown.size_heads]]
    for gauge, label in many_ranks.shown(shown.gauges):
        rank = by_rank[gauge.rank]
        place, held = ([words(rank) for _, words in c] for c in (shown.places, shown.work))
        drawn = f"[{letters(gauge, largest=largest, width=16)}]"
        lines.append([label, *place, drawn, *held, *shown.sizes(rank)])
    return "\n".join(
        [
            f"{_title(ranks)}  {one_line(stamp)}",
            _summary(ranks),
            *_below(ranks, shown),
            *text_table(lines, left=2 + len(places) + len(work)),
            *many_ranks.strip_text(shown.gauges),
        ]
    )


def _head(shown: _Table) -> str:
    return (
        head_cell("rank", style=FIRST)
        + "".join(head_cell(name) for name, _ in shown.places)
        + head_cell(shown.memory_head)
        + "".join(head_cell(name, right=True) for name in shown.size_heads)
        + "".join(head_cell(name) for name, _ in shown.work)
    )


# ---------------------------------------------------------------- what ranks share


def _title(ranks: Sequence[RankStatus]) -> str:
    """``2 CPU ranks``."""
    kinds = {rank.device.partition(":")[0] for rank in ranks}
    kind = {"cpu": "CPU ", "cuda": "GPU "}.get(kinds.pop(), "") if len(kinds) == 1 else ""
    return f"{len(ranks)} {kind}rank{'s' if len(ranks) != 1 else ''}"


def _summary(ranks: Sequence[RankStatus]) -> str:
    """``on node-a · NVIDIA H100, capacity 80.0 GiB each · torch 2.13.0``."""
    hosts = list(dict.fromkeys(_host(rank) for rank in ranks))
    parts = [f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts"]
    parts += [] if _differ(ranks, _name) else [_name(ranks[0])]
    capacities = {rank.capacity_bytes for rank in ranks}
    if len(capacities) == 1:
        each = " each" if len(ranks) > 1 else ""
        parts.append(f"capacity {bytes_text(capacities.pop())}{each}")
    torch = {one_line(rank.torch_version) for rank in ranks} - {""}
    parts += [f"torch {', '.join(sorted(torch))}"] if torch else []
    return " · ".join(parts)


def _below(ranks: Sequence[RankStatus], shown: _Table) -> list[str]:
    """Return lines on what all ranks hold, and on which host is which of many ranks."""
    lines = [] if shown.work or not ranks[0].models else [_work(ranks[0])]
    if len(ranks) < many_ranks.MANY_RANKS or not _differ(ranks, _host):
        return lines
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(_host(rank), []).append(rank.rank)
    hosts = [f"{host}: ranks {ranks_text(tuple(on))}" for host, on in by_host.items()]
    rest = [f"{len(hosts) - _MOST_HOSTS} more hosts"] if len(hosts) > _MOST_HOSTS else []
    return [*lines, " · ".join([*hosts[:_MOST_HOSTS], *rest])]


def _differ(ranks: Sequence[RankStatus], words: _Words) -> bool:
    return len({words(rank) for rank in ranks}) > 1


def _host(rank: RankStatus) -> str:
    return shortened(rank.host, 40)


def _device(rank: RankStatus) -> str:
    return shortened(rank.device, 40)


def _name(rank: RankStatus) -> str:
    return shortened(rank.device_name, 40) or UNKNOWN


def _work(rank: RankStatus) -> str:
    """``model, nets["G"] · 640 steps done``."""
    if not rank.models:
        return "no model"
    models = ", ".join(shortened(model, 60) for model in rank.models)
    return f"{models} · {rank.steps:,} step{'s' if rank.steps != 1 else ''} done"


def _gauge(rank: RankStatus) -> Gauge:
    return Gauge(
        rank=rank.rank,
        device_name=rank.device_name,
        memory=rank.memory,
        peak_bytes=None,
        activity=rank.activity,
    )
