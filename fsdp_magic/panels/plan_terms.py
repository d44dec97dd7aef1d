"""Every term of one planned figure, with its source, as a table; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_magic.core.planning.memory_plan import MemoryPlan
from fsdp_magic.core.planning.terms import PEAK, USABLE, Term, Terms
from fsdp_magic.core.units import bytes_text
from fsdp_magic.panels.parts import (
    FIRST,
    MemoryUnit,
    card,
    cell,
    escape,
    head_cell,
    headline,
    memory_unit,
    number_cell,
    row,
    shortened,
    table,
    text_table,
)

_TOTALS = (USABLE, PEAK)


def html(plan: MemoryPlan, strategy: str, micro_batch_size: int | None = None) -> str:
    """Return the terms of a strategy's peak at a micro-batch size as HTML."""
    size, terms = _terms(plan, strategy, micro_batch_size)
    unit = _unit(terms)
    head = (
        head_cell("term", style=FIRST)
        + head_cell(unit.name, right=True)
        + head_cell("where it is from")
    )
    rows = [_row(term, unit) for term in terms]
    content = headline("Terms of the plan", summary=_summary(plan, strategy, size))
    return card(content + table(head, rows), label="Terms of the plan")


def text(plan: MemoryPlan, strategy: str, micro_batch_size: int | None = None) -> str:
    """Return the same as text."""
    size, terms = _terms(plan, strategy, micro_batch_size)
    unit = _unit(terms)
    rows = [["term", unit.name], *([term.name, _size(term, unit)] for term in terms)]
    sources = ["where it is from", *(term.source for term in terms)]
    lines = [f"{a}  {b}" for a, b in zip(text_table(rows), sources, strict=True)]
    return "\n".join([f"Terms of the plan  {_summary(plan, strategy, size)}", *lines])


def _terms(plan: MemoryPlan, strategy: str, micro_batch_size: int | None) -> tuple[int, Terms]:
    size = micro_batch_size or plan.shown_size(strategy)
    return size, plan.terms(strategy, size)


def _unit(terms: Sequence[Term]) -> MemoryUnit:
    """Return one unit for all, as fine as the smallest term that counts."""
    return replace(memory_unit(term.bytes for term in terms), decimals=3)


def _size(term: Term, unit: MemoryUnit) -> str:
    """Return the bytes of a term, in a unit of its own if they are few."""
    digits = unit.text(term.bytes)
    return digits if float(digits.replace(",", "")) else bytes_text(term.bytes)


def _row(term: Term, unit: MemoryUnit) -> str:
    bold = "font-weight:600;" if term.name in _TOTALS else ""
    bold += "vertical-align:top;"
    wraps = "white-space:normal;overflow-wrap:anywhere;"
    return row(
        cell(escape(shortened(term.name, 100)), style=FIRST + wraps + bold)
        + number_cell(_size(term, unit), style=bold)
        + cell(escape(term.source), style=f"{wraps}vertical-align:top;opacity:.8;")
    )


def _summary(plan: MemoryPlan, strategy: str, size: int) -> str:
    name = shortened(plan[strategy].name, 80)
    return f"{name}, micro-batch {size:,}, on {plan.world_size:,} x {plan.device.name}"
