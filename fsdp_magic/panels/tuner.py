"""The panel of a search for a batch size, from its first frame to the one that stays; pure.

The state in words and what ended it, then a table of strategies if some were asked for, then the
chart of one strategy with its measurements beside it, on a narrow page beneath. Where lines break
depends on the width of the page and never on what stands in them, so that nothing jumps.
"""

from __future__ import annotations

from fsdp_magic.core.units import bytes_text, seconds_text
from fsdp_magic.panels import tuner_chart
from fsdp_magic.panels.parts import (
    BLUE,
    GREEN,
    GREY,
    NUMBERS,
    ORANGE,
    RED,
    SMALL,
    card,
    escape,
    icon,
    muted,
    notes_html,
    notes_text,
    shortened,
)
from fsdp_magic.panels.tuner_chart import pick_text
from fsdp_magic.panels.tuner_table import (
    capacity_text,
    measurements_html,
    measurements_text,
    name_html,
    rate_text,
    strategies_html,
    strategies_text,
)
from fsdp_magic.panels.tuner_view import TunedRow, TunerState, TunerView

_STATES: dict[TunerState, tuple[str, str]] = {
    "planning": ("○", GREY),
    "searching": ("●", BLUE),
    "done": ("✓", GREEN),
    "stopped": ("■", ORANGE),
    "failed": ("✕", RED),
}
_FOUND = {"memory": "largest micro-batch", "throughput": "fastest micro-batch"}
_ROWS_HEIGHT = 128
"""Pixels of the measurements on a narrow page, where they stand alone: a head and six rows."""


def html(view: TunerView) -> str:
    """Return a frame as HTML."""
    content = (
        _headline(view)
        + f'<div style="min-height:19px;margin-bottom:6px;overflow-wrap:break-word">'
        f"{escape(_sentence(view))} </div>"
        + strategies_html(view)
        + _strategy_title(view)
        + '<div style="display:flex;flex-wrap:wrap;gap:6px 16px">'
        f'<div style="flex:2 1 330px;min-width:0">'
        f"{tuner_chart.html(view, as_image=_is_over(view))}</div>"
        f'<div style="flex:1 1 296px;min-width:0;min-height:{_ROWS_HEIGHT}px">'
        f"{measurements_html(view)}</div></div>" + notes_html(view.notes)
    )
    return card(content, label=f"Batch size: {shortened(_state(view), 120)}")


def text(view: TunerView) -> str:
    """Return a frame as text; its first line tells of the search by itself, in a log."""
    so_far = _so_far(view) if not _is_over(view) else ""
    parts = ("Batch size", _state(view), so_far, *_beside(view))
    head = "  ".join(part for part in parts if part)
    whose = f"{shortened(view.strategy, 80)}:" if view.strategy else ""
    scale = (whose, capacity_text(view), shortened(view.stamp, 20))
    shown = " ".join(part for part in scale if part)
    lines = [head, _sentence(view), *strategies_text(view), shown, *measurements_text(view)]
    if label := pick_text(view):
        lines.append(f"{'found' if view.state == 'done' else 'so far'} {label}")
    lines += [_plan_text(view)]
    return "\n".join([*(line for line in lines if line), *notes_text(view.notes)])


# ---------------------------------------------------------------- head


def _headline(view: TunerView) -> str:
    """Return the state, what the size means, and how long it took, in three boxes."""
    found_nothing = view.state == "done" and not (view.pick or _best(view))
    sign, colour = _STATES["failed" if found_nothing else view.state]
    product, cost = (escape(part) for part in _beside(view))
    state = escape(_state(view))
    cut = "min-width:0;min-height:19px;overflow:hidden;text-overflow:ellipsis"
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:0px 12px;white-space:nowrap;{NUMBERS}">'
        f'<div title="{state}" style="flex:1 1 305px;{cut}"><b>Batch size </b> '
        f"{icon(sign, colour)} {state} </div>"
        f'<div title="{product}" style="flex:1 1 260px;{cut};opacity:.7">{product} </div>'
        f'<div style="flex:0 1 215px;display:flex;justify-content:space-between;gap:0px 12px">'
        f"<span>{muted(f'{cost} ')}</span>"
        f'<span style="{SMALL}">{escape(shortened(view.stamp, 20))} </span></div></div>'
    )


def _state(view: TunerView) -> str:
    """Return where the search is, in words that stand alone."""
    if view.state == "planning":
        return "planning what each size takes"
    if view.state == "searching":
        doing = f"trying {view.trying:,} …" if view.trying is not None else "choosing a size …"
        return f"searching, {doing}"
    if view.state == "done":
        return _result(view)
    so_far = _so_far(view)
    return f"{view.state}, {so_far}" if so_far else view.state


def _so_far(view: TunerView) -> str:
    return f"{view.pick:,} fits so far" if view.pick else ""


def _result(view: TunerView) -> str:
    best = _best(view)
    if best is not None and best.micro_batch_size:
        return f"{_FOUND[view.objective]} {best.micro_batch_size:,}, {shortened(best.name, 80)}"
    if view.rows:
        return "no strategy fits"
    if not view.pick:
        return "not even the smallest size fits"
    return f"{_FOUND[view.objective]} {view.pick:,}"


def _beside(view: TunerView) -> tuple[str, str]:
    """Return what the size found means for a step, and what finding it took."""
    probes = view.probes if not view.rows else ()
    count = sum(row.probes for row in view.rows) if view.rows else len(probes)
    took = f"{view.seconds:.1f} s" if view.seconds < 60 else seconds_text(view.seconds)
    cost = f"{count:,} probe{'s' if count != 1 else ''} in {took}"
    return _samples(view), cost


def _samples(view: TunerView) -> str:
    """Return how a step's samples come about: ``23 × 4 × 2 ranks = 184 samples a step``."""
    best = _best(view)
    if view.rows:
        if best is None or best.samples_per_step is None:
            return ""
        rate = best.samples_per_second
        speed = "" if rate is None else f" · {rate_text(rate)} samples/s"
        return f"{best.samples_per_step:,} samples a step{speed}"
    if not view.pick:
        return ""
    ranks = f"{view.ranks:,} rank{'s' if view.ranks != 1 else ''}"
    total = view.pick * view.accumulate * view.ranks
    factors = f"{view.pick:,} × {view.accumulate:,} × {ranks}"
    return f"{factors} = {total:,} samples a step"


def _best(view: TunerView) -> TunedRow | None:
    return next((row for row in view.rows if row.is_best), None)


def _sentence(view: TunerView) -> str:
    """Return what ended the search, or how far it can go."""
    if view.ended_by:
        ended = shortened(view.ended_by, 600)
        if view.rows:
            return f"{shortened(view.strategy, 80)}: {ended}"
        return f"{ended[:1].upper()}{ended[1:]}"
    if _is_over(view):
        return ""
    reach = f"at most {view.most:,}" if view.most is not None else ""
    return ", ".join(part for part in (_so_far(view), reach) if part)


def _strategy_title(view: TunerView) -> str:
    """Return whose chart it is, where there are several strategies."""
    if not view.strategy or not (view.rows or view.pending):
        return ""
    last = " the last one searched" if _is_over(view) else " under search"
    return (
        f'<div style="margin:12px 0px 6px 0px"><b>{name_html(view.strategy)} </b>{muted(last)}'
        "</div>"
    )


def _plan_text(view: TunerView) -> str:
    """Return what the plan says of the sizes that were tried."""
    planned = dict(view.planned)
    said = [
        f"{p.micro_batch_size:,}: {bytes_text(planned[p.micro_batch_size])}"
        for p in view.probes
        if p.micro_batch_size in planned
    ]
    return f"predicted {', '.join(said)}" if said else ""


def _is_over(view: TunerView) -> bool:
    return view.state in ("done", "stopped", "failed")
