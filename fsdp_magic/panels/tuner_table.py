"""The tuner's tables: what each size took, and what each strategy came to; pure."""

from __future__ import annotations

from fsdp_magic.core.units import UNKNOWN, bytes_text
from fsdp_magic.panels.parts import (
    BLUE,
    FIRST,
    GREEN,
    GREY,
    ORANGE,
    RED,
    TRACK,
    MemoryUnit,
    cell,
    escape,
    head_cell,
    icon,
    memory_unit,
    number_cell,
    percent_text,
    row,
    shortened,
    table,
    text_table,
)
from fsdp_magic.panels.tuner_view import ProbeView, TunedRow, TunerView

_WRAPS = "white-space:normal;overflow-wrap:break-word;"
_LONG_NAME = 15
_LONGEST = 300


# ---------------------------------------------------------------- sizes of one strategy


def measurements_html(view: TunerView) -> str:
    """Return a row for each size that was tried, in the order in which that was."""
    unit = _probe_unit(view)
    heads = ["size", f"peak,&nbsp;{unit.name}", "of capacity", "samples/s"]
    head = (
        head_cell(heads[0], style=FIRST, right=True)
        + "".join(head_cell(each, right=True, style=_WRAPS) for each in heads[1:])
        + head_cell("verdict")
    )
    rows = [_probe_html(each, view, unit) for each in view.probes]
    if view.trying is not None:
        sign = f"{icon('○', BLUE)} trying"
        rows.append(
            row(
                number_cell(f"{view.trying:,}", style=FIRST)
                + "".join(number_cell("") for _ in heads[1:])
                + cell(sign)
            )
        )
    return table(head, rows)


def measurements_text(view: TunerView) -> list[str]:
    """Return the same as lines of text."""
    unit = _probe_unit(view)
    rows = [["size", f"peak, {unit.name}", "of capacity", "samples/s", "verdict"]]
    rows += [
        [*_probe_cells(each, view, unit), f"{_verdict(each, view)[0]} {_verdict(each, view)[2]}"]
        for each in view.probes
    ]
    if view.trying is not None:
        rows.append([f"{view.trying:,}", "", "", "", "○ trying"])
    if len(rows) == 1:
        return []
    numbers = text_table([each[:-1] for each in rows], left=0)
    width = max(map(len, numbers))
    return [f"{line.ljust(width)}  {each[-1]}" for line, each in zip(numbers, rows, strict=True)]


def _probe_html(each: ProbeView, view: TunerView, unit: MemoryUnit) -> str:
    size, *rest = _probe_cells(each, view, unit)
    sign, colour, word = _verdict(each, view)
    is_pick = each.fits and each.micro_batch_size == view.pick
    return row(
        number_cell(f"<b>{size}</b>" if is_pick else size, style=FIRST)
        + "".join(map(number_cell, rest))
        + cell(f"{icon(sign, colour)} {escape(word)}", style=f"{_WRAPS}min-width:64px")
    )


def _probe_cells(each: ProbeView, view: TunerView, unit: MemoryUnit) -> list[str]:
    """Return size, peak, its share of the capacity and speed as text."""
    share = None
    if each.peak_bytes is not None and view.capacity_bytes:
        share = 100 * each.peak_bytes / view.capacity_bytes
    return [
        f"{each.micro_batch_size:,}",
        unit.text(each.peak_bytes),
        percent_text(share),
        rate_text(each.samples_per_second),
    ]


def _verdict(each: ProbeView, view: TunerView) -> tuple[str, str, str]:
    """Return sign, colour and words of what came of a size."""
    if not each.fits:
        return "✕", RED, shortened(each.why, _LONGEST) or "does not fit"
    if each.micro_batch_size == view.pick:
        is_fastest = view.objective == "throughput" and view.state == "done"
        found = "fastest" if is_fastest else "largest"
        return "✓", GREEN, f"fits, {found}"
    return "✓", GREEN, "fits"


def rate_text(value: float | None) -> str:
    """Return samples per second: ``412``, ``8.5``, ``n/a``."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3g}"


def _probe_unit(view: TunerView) -> MemoryUnit:
    return memory_unit([probe.peak_bytes for probe in view.probes])


# ---------------------------------------------------------------- strategies


def strategies_html(view: TunerView) -> str:
    """Return a row for each strategy: done, under search, still to come; nothing without any."""
    if not view.rows and not view.pending:
        return ""
    unit = _row_unit(view)
    head = (
        head_cell("strategy", style=FIRST)
        + head_cell("largest micro-batch" if _wants_most(view) else "fastest", style=_WRAPS)
        + head_cell(
            _stacking("samples/<wbr>step", "samples/s", f"peak,&nbsp;{unit.name}"),
            right=True,
            style=_WRAPS,
        )
        + head_cell("ended by, after", style=_WRAPS)
    )
    rows = [_row_html(each, view, unit) for each in view.rows]
    rows += [
        row(
            cell(name_html(name), style=FIRST + _WRAPS)
            + f'<td colspan="3" style="{_SPAN}">{icon("○", GREY)} to come</td>'
        )
        for name in view.pending
    ]
    return table(head, rows)


def strategies_text(view: TunerView) -> list[str]:
    """Return the same as lines of text."""
    if not view.rows and not view.pending:
        return []
    unit = _row_unit(view)
    picked = "largest" if _wants_most(view) else "fastest"
    rows = [
        ["strategy", picked, "samples a step", "samples/s", f"peak, {unit.name}", "probes", "ended"]
    ]
    for each in view.rows:
        cells = [label(each), _pick(each), *_row_cells(each, unit)]
        rows.append([*cells, "" if each.failure else _ended(each)])
    rows += [[shortened(name, 80), "to come", "", "", "", "", ""] for name in view.pending]
    lines = text_table([each[:-1] for each in rows])
    width = max(map(len, lines))
    shown = [
        f"{line.ljust(width)}  {each[-1]}".rstrip() for line, each in zip(lines, rows, strict=True)
    ]
    failures = [f"{label(e)}: {shortened(e.failure, _LONGEST)}" for e in view.rows if e.failure]
    return [*shown, *failures]


def label(each: TunedRow) -> str:
    """Return the name of a strategy with what a person should know of it."""
    said = [word for word, is_so in (("as now", each.is_present), ("best", each.is_best)) if is_so]
    name = shortened(each.name, 80)
    return f"{name} ({', '.join(said)})" if said else name


def name_html(name: str) -> str:
    """Return the name of a strategy as HTML that may go on in the next line at a sign in it."""
    content = escape(shortened(name, 80))
    if len(name) < _LONG_NAME:
        return content
    for sign in "+_":
        content = content.replace(sign, f"{sign}<wbr>")
    return content


def _row_html(each: TunedRow, view: TunerView, unit: MemoryUnit) -> str:
    said = " (as now)" if each.is_present else ""
    name = f"{name_html(each.name)}{said}"
    if each.is_best:
        name = f"{icon('✓', GREEN)} <b>{name}, best</b>"
    first = cell(name, style=FIRST + _WRAPS)
    if each.failure:
        reason = escape(shortened(each.failure, _LONGEST))
        return row(f'{first}<td colspan="3" style="{_SPAN}">{icon("▲", ORANGE)} {reason}</td>')
    per_step, rate, peak, _ = _row_cells(each, unit)
    ended = escape(", ".join(part for part in (_ended(each), _probes(each)) if part))
    return row(
        first
        + cell(_bar(each, view), style="width:20%")
        + number_cell(_stacking(per_step, rate, peak), style=_WRAPS)
        + cell(ended, style=_WRAPS)
    )


def _bar(each: TunedRow, view: TunerView) -> str:
    """Return the pick as a bar beside its figure, on one scale for all strategies."""
    if each.micro_batch_size is None:
        return f"{icon('●', BLUE)} searching"
    if not each.micro_batch_size:
        return f"{icon('✕', RED)} <b>none fits</b>"
    most = max(row.micro_batch_size or 0 for row in view.rows)
    share = 100 * each.micro_batch_size / most
    colour = GREEN if each.is_best else BLUE
    return (
        '<div style="display:flex;align-items:center;gap:0px 6px"><div style="flex:1 1 0%;'
        f'height:8px;background:{TRACK};border-radius:3px;overflow:hidden"><div style="width:'
        f'{share:.1f}%;height:8px;background:{colour}"></div></div><b style="flex:none;min-width:'
        f'24px;text-align:right">{each.micro_batch_size:,} </b></div>'
    )


def _row_cells(each: TunedRow, unit: MemoryUnit) -> list[str]:
    """Return samples a step, speed, peak and number of probes as text."""
    if not each.micro_batch_size:
        return ["", "", "", f"{each.probes:,}"]
    per_step = UNKNOWN if each.samples_per_step is None else f"{each.samples_per_step:,}"
    rate = rate_text(each.samples_per_second)
    return [per_step, rate, unit.text(each.peak_bytes), f"{each.probes:,}"]


def _pick(each: TunedRow) -> str:
    if each.failure:
        return "failed"
    if each.micro_batch_size is None:
        return "searching"
    return f"{each.micro_batch_size:,}" if each.micro_batch_size else "none fits"


def _ended(each: TunedRow) -> str:
    return shortened(each.ended_by, _LONGEST)


def _probes(each: TunedRow) -> str:
    return f"{each.probes:,} probe{'s' if each.probes != 1 else ''}"


def _stacking(*columns: str) -> str:
    """Return columns as HTML that stand below each other on a narrow page."""
    style = "display:inline-block;min-width:56px;padding-left:2px;text-align:right"
    return " ".join(f'<span style="{style}">{each}</span>' for each in columns)


def _row_unit(view: TunerView) -> MemoryUnit:
    return memory_unit([*(each.peak_bytes for each in view.rows)])


def _wants_most(view: TunerView) -> bool:
    return view.objective == "memory"


def capacity_text(view: TunerView) -> str:
    """Return the limit of the search: ``80.0 GiB a rank, 5 % of it stays free``."""
    if view.capacity_bytes is None:
        return ""
    return f"{bytes_text(view.capacity_bytes)} a rank, {100 * view.margin:g} % of it stays free"


_SPAN = "border:0;padding:1px 0 1px 10px;text-align:left;line-height:16px;overflow-wrap:anywhere"
