"""What strategies need before they run: peak memory, the largest micro-batch, a ranking; pure.

First a table, a row a strategy: the largest micro-batch size as an interval, of which the safe
end is bold, and the peak of one size for all as a bar cut into kinds, on one scale. Then memory
over two steps of one strategy, and what to change about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_magic.core.planning.memory_plan import Interval
from fsdp_magic.core.units import bytes_text
from fsdp_magic.panels import plan_timeline
from fsdp_magic.panels.memory_kinds import MEMORY_KINDS, MemoryKind, drawn, key_to_colours
from fsdp_magic.panels.parts import (
    FIRST,
    ORANGE,
    RED,
    TRACK,
    MemoryUnit,
    card,
    cell,
    escape,
    head_cell,
    headline,
    hidden,
    icon,
    memory_unit,
    muted,
    notes_html,
    notes_text,
    number_cell,
    row,
    shortened,
    table,
    text_table,
)
from fsdp_magic.panels.plan_view import PlanRow, PlanView

_WRAPS = "white-space:normal;"
_EMPTY = 1 / 32
"""A device is no measure for bars that are all shorter than this share of it."""
_SEEN = 1 / 400
"""A part below this share of a full bar is not seen in it."""
_BAR_HEIGHT = 12


def html(view: PlanView) -> str:
    """Return a plan as HTML."""
    content = (
        headline("Memory plan", summary=_summary(view), stamp=view.stamp)
        + _key(view)
        + table(
            _head_html(view),
            [*(_row_html(each, view) for each in view.rows), *_untraced_html(view)],
        )
        + plan_timeline.html(view)
        + _advice_html(view)
        + notes_html(_notes(view))
    )
    return card(content, label="Memory plan")


def text(view: PlanView) -> str:
    """Return the same as text."""
    unit, full = _unit(view), _full_bytes(view)
    heads = ["strategy", "largest", f"peak at {view.bar_size:,}", "+ per sample", "fullest in"]
    rows = [[*heads, *_rank_head(view), f"full bar {bytes_text(full)}"]]
    for each in view.rows:
        more = _sample_text(each, unit) or "-"
        sizes = [unit.text(each.peak_bytes), more]
        cells = [
            shortened(each.name, 80),
            str(each.largest),
            *sizes,
            shortened(each.phase, 40),
        ]
        rows.append([*cells, *_rank_cells(each, view), f"[{_letters(each, full)}]"])
    kinds = _kinds(view)
    lines = [f"Memory plan  {_summary(view)}  {shortened(view.stamp, 20)}".rstrip()]
    lines += text_table(rows)
    lines += [
        f"{shortened(name, 80)}: not planned: {shortened(why, 300)}"
        for name, why in view.untraced.items()
    ]
    lines.append(f"in {unit.name}; " + "  ".join(f"{kind.letter} {kind.name}" for kind in kinds))
    lines += plan_timeline.text(view)
    lines += [f"- {shortened(each, 600)}" for each in view.advice]
    return "\n".join([*lines, *notes_text(_notes(view))])


# ---------------------------------------------------------------- the table


def _key(view: PlanView) -> str:
    full = _full_bytes(view)
    usable = f", of which {bytes_text(view.usable_bytes)} are usable (red)"
    scale = f"full bar {bytes_text(full)}{usable if full > view.usable_bytes else ' usable'}"
    if full < view.usable_bytes:
        scale = f"full bar {bytes_text(full)}; {bytes_text(view.usable_bytes)} are usable"
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:0px 14px;'
        f'margin:4px 0px 2px 0px">{key_to_colours(_kinds(view))}'
        f'<span style="font-size:12px">{muted(escape(scale))}</span></div>'
    )


def _head_html(view: PlanView) -> str:
    unit = _unit(view)
    return (
        head_cell("strategy", style=FIRST)
        + head_cell("largest micro-batch", right=True, style=_WRAPS)
        + head_cell(f"peak at micro-batch {view.bar_size:,}", style=_WRAPS)
        + head_cell(_pair(f"{unit.name} + per sample", "fullest in"), right=True, style=_WRAPS)
        + "".join(head_cell(each, right=True) for each in _rank_head(view))
    )


def _row_html(each: PlanRow, view: PlanView) -> str:
    unit = _unit(view)
    is_shown = view.shown is each and len(view.rows) > 1
    name = plan_timeline.strategy_html(each.name)
    step, _, phase = shortened(each.phase, 40).partition(": ")
    sample = _sample_text(each, unit).replace(" ", "&nbsp;")
    more = muted(f"+&nbsp;{sample}") if sample else ""
    return row(
        cell(f"<b>{name}</b>" if is_shown else name, style=FIRST + _WRAPS)
        + number_cell(_largest_html(each.largest), style=_WRAPS)
        + cell(_bar(each, view), style="width:30%;min-width:24px")
        + number_cell(
            _pair(f"{unit.text(each.peak_bytes)} {more}", escape(phase or step)), style=_WRAPS
        )
        + "".join(number_cell(escape(rank)) for rank in _rank_cells(each, view))
    )


def _untraced_html(view: PlanView) -> list[str]:
    """Return a row for each strategy that has no plan, with the reason."""
    columns = 3 + len(_rank_head(view))
    style = "border:0;padding:1px 0 1px 10px;text-align:left;line-height:16px"
    return [
        row(
            cell(plan_timeline.strategy_html(name), style=FIRST + _WRAPS)
            + f'<td colspan="{columns}" style="{style}">{icon("▲", ORANGE)} not planned: '
            f"{escape(shortened(why, 300))}</td>"
        )
        for name, why in view.untraced.items()
    ]


def _sample_text(each: PlanRow, unit: MemoryUnit) -> str:
    """Return what a sample more takes, in a unit of its own if it is little; or nothing."""
    if not each.largest.ideal:
        return ""
    digits = unit.text(each.sample_bytes)
    return digits if float(digits.replace(",", "")) else bytes_text(each.sample_bytes)


def _pair(size: str, phase: str) -> str:
    """Return two columns as HTML that stand below each other on a narrow page."""
    return (
        f'<span style="display:inline-block">{size}</span> <span style="display:inline-block;'
        f'min-width:64px;text-align:left;padding-left:8px">{phase}</span>'
    )


def _largest_html(largest: Interval) -> str:
    if largest.is_open:
        return f"<b>{largest}</b>"
    if not largest.ideal:
        return f"{icon('▲', RED)} <b>none</b>"
    beyond = f" {muted(f'to {largest.ideal:,}')}" if largest.ideal > largest.safe else ""
    return f"<b>{largest.safe:,}</b>{beyond}"


def _rank_head(view: PlanView) -> list[str]:
    return ["speed"] if view.card else []


def _rank_cells(each: PlanRow, view: PlanView) -> list[str]:
    if not view.card:
        return []
    return ["-" if each.rank is None else f"#{each.rank}"]


# ---------------------------------------------------------------- bars


def _bar(each: PlanRow, view: PlanView) -> str:
    unit, full = _unit(view), _full_bytes(view)
    sizes = list(zip(MEMORY_KINDS, drawn(each.kinds), strict=True))
    boxes = "".join(_box(kind, size, full, unit) for kind, size in sizes if size)
    words = ", ".join(f"{kind.name} {unit.text(size)}" for kind, size in sizes if size)
    limit = ""
    if full > view.usable_bytes:
        left = 100 * view.usable_bytes / full
        limit = (
            f'<span title="usable {bytes_text(view.usable_bytes)}" style="position:absolute;'
            f'left:{left:.2f}%;height:100%;border-left:2px solid {RED}"></span>'
        )
    label = escape(f"{shortened(each.name, 80)}: {words} {unit.name}")
    return (
        f'<div role="img" aria-label="{label}" style="display:flex;position:relative;'
        f"height:{_BAR_HEIGHT}px;background:{TRACK};"
        f'border-radius:3px;overflow:hidden">{boxes}{limit}'
        f"{hidden(f'{words} {unit.name}')}</div>"
    )


def _box(kind: MemoryKind, size: float, full: int, unit: MemoryUnit) -> str:
    share = 100 * size / full
    edge = ";box-shadow:inset -1px 0px 0px rgba(255,255,255,.5)" if share > 0.8 else ""
    title = f"{kind.name} {unit.text(size)} {unit.name}"
    return f'<span title="{title}" style="width:{share:.2f}%;{kind.style}{edge}"></span>'


def _letters(each: PlanRow, full: int, width: int = 24) -> str:
    line, filled = "", 0.0
    for kind, size in zip(MEMORY_KINDS, drawn(each.kinds), strict=True):
        filled += width * size / full
        line += kind.letter * (round(filled) - len(line))
    return line[:width].ljust(width)


def _kinds(view: PlanView) -> list[MemoryKind]:
    """Return the kinds that some bar shows."""
    sizes = [drawn(each.kinds) for each in view.rows]
    least = _SEEN * _full_bytes(view)
    return [k for number, k in enumerate(MEMORY_KINDS) if any(s[number] > least for s in sizes)]


def _full_bytes(view: PlanView) -> int:
    """Return what a full bar means: what is usable, or the largest peak beyond it."""
    highest = max((each.peak_bytes for each in view.rows), default=1)
    if highest < _EMPTY * view.usable_bytes:
        return 1 << max(1, highest - 1).bit_length()
    return max(highest, view.usable_bytes, 1)


def _unit(view: PlanView) -> MemoryUnit:
    return memory_unit([*(each.peak_bytes for each in view.rows)])


# ---------------------------------------------------------------- words


def _summary(view: PlanView) -> str:
    ranks = f"{view.world_size:,} rank{'s' if view.world_size != 1 else ''}"
    of = f"{shortened(view.model, 60)} " if view.model else ""
    device = f"{shortened(view.device_name, 30)}, {bytes_text(view.usable_bytes)} of it usable"
    return f"{of}on {ranks}, each {device}; predicted"


def _advice_html(view: PlanView) -> str:
    if not view.advice or view.timeline is None:
        return ""
    lines = "".join(
        f'<div style="padding-left:12px;text-indent:-12px">• {_advised(each)}</div>'
        for each in view.advice
    )
    name = plan_timeline.strategy_html(view.timeline.strategy)
    return (
        '<div style="margin-top:8px;font-size:12px;overflow-wrap:anywhere">'
        f"<b>What would leave room under {name} </b>{lines}</div>"
    )


def _advised(sentence: str) -> str:
    part, colon, change = shortened(sentence, 600).partition(": ")
    return f"<b>{escape(part)}</b>{colon}{escape(change)}" if colon else escape(part)


def _notes(view: PlanView) -> Sequence[str]:
    notes = [*view.notes]
    notes += _about_largest(view)
    if view.card:
        notes.append(
            "Speed is a ranking by time per sample at the largest size: computing or memory, and "
            f"what goes over links in full, after the data sheet of {shortened(view.card, 30)}; it "
            "promises no seconds"
        )
    return notes


def _about_largest(view: PlanView) -> list[str]:
    """Return what the figures of the largest micro-batch mean."""
    found = [each.largest for each in view.rows if each.largest.ideal]
    if all(largest.is_open for largest in found):
        return []
    if view.is_cpu:
        return ["Largest micro-batch: on CPU engines nothing is lost between tensors"]
    if all(largest.safe == largest.ideal for largest in found):
        return ["Largest micro-batch: what the caching allocator loses to fragmentation is counted"]
    return [
        "Largest micro-batch: the first figure fits with what the caching allocator loses to "
        "fragmentation, the second if it lost nothing; take the first"
    ]
