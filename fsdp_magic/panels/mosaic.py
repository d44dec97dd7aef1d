"""The placement mosaic: which rank holds how much of which module; pure.

A row per module (``module_rows``), a column per rank, a bar as long as the bytes held there.
With many ranks those that hold the same share a column. Beneath, each row of several
tensors opens to them.
A model of many different modules would fill a page of megabytes, so rows and opened tensors are
limited by their size; what is left out is said, with its sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fsdp_magic.core.placement import Placement
from fsdp_magic.core.units import bytes_text
from fsdp_magic.panels.module_rows import ModuleRow, Tensor, held_bytes, module_rows
from fsdp_magic.panels.mosaic_head import manner, summary
from fsdp_magic.panels.mosaic_table import (
    REPLICATED,
    SHARDED,
    Column,
    Tip,
    bar_cells,
    columns_of,
    left_out_text,
    line,
    mosaic_table,
    text_bar,
)
from fsdp_magic.panels.parts import (
    RULE,
    SMALL,
    card,
    escape,
    headline,
    muted,
    notes_html,
    notes_text,
    shortened,
    text_table,
)

_MOST_BYTES, _MOST_ROW_BYTES = 44_000, 26_000
"""Of all rows together, opened ones included, and of the rows of modules."""
_MOST_TEXT_ROWS = 40


def html(placement: Placement) -> str:
    """Return the mosaic of a model."""
    rows, columns = module_rows(placement.parameters), columns_of(placement)
    longest = _longest(rows)
    lines = _fitting((_module_line(row, columns, longest) for row in rows), _MOST_ROW_BYTES)
    shown, rest = rows[: len(lines)], rows[len(lines) :]
    lines += [_rest_line(rest, columns, longest)] if rest else []
    held = _held(placement, rows)
    lines.append(_total_line(held, columns))
    room = _MOST_BYTES - sum(len(drawn.encode()) for drawn in lines)
    content = (
        _heading(placement, rows, held)
        + mosaic_table(columns, lines, what="module")
        + _details(shown, columns, room=room)
        + notes_html(_notes(placement, columns))
    )
    return card(content, label="Placement")


def text(placement: Placement) -> str:
    """Return the mosaic as text."""
    rows, columns = module_rows(placement.parameters), columns_of(placement)
    shown, rest = rows[:_MOST_TEXT_ROWS], rows[_MOST_TEXT_ROWS:]
    longest = _longest(rows)
    lines = [["module", *(column.heading for column in columns), "all ranks"]]
    for row in shown:
        bars = [text_bar(row.held[column.rank], longest) for column in columns]
        name = shortened(_row_name(row), 60) + (f" ×{row.blocks}" if row.blocks > 1 else "")
        name += f" {_shape(row.tensors[0].placement.shape)}" if len(row.tensors) == 1 else ""
        lines.append([name, *bars, bytes_text(row.total_bytes)])
    if rest:
        blanks = [""] * len(columns)
        left_out = bytes_text(sum(row.total_bytes for row in rest))
        lines.append([f"… {len(rest)} more modules", *blanks, left_out])
    held = _held(placement, rows)
    sizes = [bytes_text(held[column.rank]) for column in columns]
    lines.append(["total", *sizes, bytes_text(sum(held))])
    return "\n".join(
        [
            f"{shortened(placement.model)}  {summary(placement, held)}",
            *([how] if (how := manner(placement)) else []),
            *text_table(lines, left=1 + len(columns)),
            "▇ sharded  ▒ replicated  – none on this rank",
            *notes_text(_notes(placement, columns)),
        ]
    )


def _notes(placement: Placement, columns: Sequence[Column]) -> list[str]:
    """Return what stands beneath."""
    left_out = left_out_text(columns, placement.world_size)
    return [*([left_out] if left_out else []), *placement.notes]


def _fitting(lines: Iterable[str], room: int) -> list[str]:
    """Return the first lines that fit into so many bytes."""
    fitting: list[str] = []
    for drawn in lines:
        room -= len(drawn.encode())
        if room < 0:
            break
        fitting.append(drawn)
    return fitting


def _longest(rows: Sequence[ModuleRow]) -> int:
    """Return the bytes of the longest bar."""
    return max((sum(held) for row in rows for held in row.held), default=0) or 1


def _held(placement: Placement, rows: Sequence[ModuleRow]) -> list[int]:
    """Return the bytes on each rank; rows have added them up over equal blocks already."""
    return [sum(sum(row.held[rank]) for row in rows) for rank in range(placement.world_size)]


# ---------------------------------------------------------------- the table


def _heading(placement: Placement, rows: Sequence[ModuleRow], held: Sequence[int]) -> str:
    """Return name, numbers and the key to the bars."""
    kinds = {parameter.kind for parameter in placement.parameters}
    empty = any(0 in tensor.placement.local_bytes for row in rows for tensor in row.tensors)
    key = [_swatch(SHARDED, "sharded")] if "sharded" in kinds else []
    key += [_swatch(REPLICATED, "replicated")] if "replicated" in kinds else []
    key += ["<span>– none on this rank</span>"] if empty else []
    aside = (
        '<span style="display:flex;flex-wrap:wrap;gap:0px 10px;font-size:12px">'
        f"{' '.join(key)}</span>"
    )
    head = headline(shortened(placement.model), summary=summary(placement, held), aside=aside)
    return f'{head}<div style="margin-bottom:4px;{SMALL}">{escape(manner(placement))} </div>'


def _swatch(style: str, name: str) -> str:
    return (
        '<span style="white-space:nowrap"><span style="display:inline-block;'
        f'width:9px;height:9px;{style}"></span> {name}</span>'
    )


def _module_line(row: ModuleRow, columns: Sequence[Column], longest: int) -> str:
    """Return the row of a module, or of its only tensor."""
    title = f' title="{escape(units)}"' if (units := _units_text(row)) else ""
    label = f"<b{title}>{escape(shortened(_row_name(row)))}</b>"
    label += f" {muted(f'×{row.blocks}')}" if row.blocks > 1 else ""
    if len(row.tensors) == 1:
        label += f" {muted(_shape(row.tensors[0].placement.shape))}"
        tip = _tensor_tip(row, row.tensors[0])
    else:
        tip = _module_tip(row)
    cells = bar_cells(row.held, columns, longest=longest, tip=tip)
    return line(label, cells, bytes_text(row.total_bytes))


def _units_text(row: ModuleRow) -> str:
    """Return what a row is gathered with; empty if nothing of it is."""
    units = [shortened(unit) or "the root" for unit in row.units]
    if not units:
        return ""
    more = f" and {len(units) - 3} more" if len(units) > 3 else ""
    return f"gathered with unit{'s' if len(units) > 1 else ''} {', '.join(units[:3])}{more}"


def _row_name(row: ModuleRow) -> str:
    """Return the name of a module, or of its only tensor."""
    if len(row.tensors) > 1:
        return row.name
    only = row.tensors[0]
    return f"{row.name}.{only.name}" if row.blocks > 1 else only.placement.name


def _module_tip(row: ModuleRow) -> Tip:
    """Return what the cells of a module say."""
    name, tensors = escape(shortened(row.name)), len(row.tensors) * row.blocks

    def tip(rank: int) -> str:
        return f"{name}&#10;rank {rank}: {bytes_text(sum(row.held[rank]))}, {tensors} tensors"

    return tip


def _rest_line(rest: Sequence[ModuleRow], columns: Sequence[Column], longest: int) -> str:
    """Return the row that stands for the modules there is no room for."""
    held = [
        (sum(sharded for sharded, _ in rank), sum(whole for _, whole in rank))
        for rank in zip(*(row.held for row in rest), strict=True)
    ]

    def tip(rank: int) -> str:
        return f"rank {rank}: {bytes_text(sum(held[rank]))}"

    fullest = max(longest, *map(sum, held))
    cells = bar_cells(held, columns, longest=fullest, tip=tip)
    total = bytes_text(sum(row.total_bytes for row in rest))
    return line(f"<b>… {len(rest)} more modules</b>", cells, total)


def _total_line(held: Sequence[int], columns: Sequence[Column]) -> str:
    """Return the row of sums."""
    cells = "".join(
        '<td style="border:0;padding:3px 4px 2px 0;text-align:left;white-space:nowrap;'
        f'font-size:11px"><b>{bytes_text(held[column.rank])}</b></td>'
        for column in columns
    )
    total = f"<b>{bytes_text(sum(held))}</b>"
    return line("<b>total</b>", cells, total, style=f"border-top:{RULE}")


# ---------------------------------------------------------------- opened rows


def _details(rows: Sequence[ModuleRow], columns: Sequence[Column], *, room: int) -> str:
    """Return what each row opens to, up to so many bytes.

    A row of one tensor says all about it already.
    """
    opened, closed = [], 0
    for row in rows:
        if len(row.tensors) == 1:
            continue
        lines = _fitting(_tensor_lines(row, columns), room)
        closed += len(row.tensors) - len(lines)
        if lines:
            opened.append(_opened(row, lines, columns))
            room -= len(opened[-1].encode())
    if closed:
        opened.append(
            f'<div style="margin-top:6px;{SMALL}">{closed:,} more tensors are not opened here; '
            "the placement's .parameters lists every one</div>"
        )
    return "".join(opened)


def _opened(row: ModuleRow, lines: Sequence[str], columns: Sequence[Column]) -> str:
    """Return the tensors of a module, or of one of its equal blocks."""
    words = f"{len(row.tensors)} tensors"
    if row.blocks > 1:
        words += f" in each of {row.blocks} equal blocks"
    return (
        '<details style="margin-top:4px"><summary style="cursor:pointer">'
        f"{escape(shortened(row.name))} {muted(f'– {words}')}</summary>"
        f"{mosaic_table(columns, lines, what='tensor')}</details>"
    )


def _tensor_lines(row: ModuleRow, columns: Sequence[Column]) -> Iterator[str]:
    """Yield the row of each tensor."""
    sizes = [sum(held) for tensor in row.tensors for held in held_bytes(tensor.placement)]
    longest = max(sizes, default=0) or 1
    for tensor in row.tensors:
        held = held_bytes(tensor.placement)
        tip, total = _tensor_tip(row, tensor), bytes_text(sum(tensor.placement.local_bytes))
        cells = bar_cells(held, columns, longest=longest, tip=tip)
        name, shape = escape(shortened(tensor.name)), muted(_shape(tensor.placement.shape))
        yield line(f"{name} {shape}", cells, total)


def _tensor_tip(row: ModuleRow, tensor: Tensor) -> Tip:
    """Return what the cells of a tensor say."""
    placement = tensor.placement
    name = placement.name if row.blocks == 1 else f"{row.name}.{tensor.name}"
    first = escape(f"{shortened(name)} {_shape(placement.shape)}")
    last = escape(f"{shortened(placement.dtype)} {placement.kind}")

    def tip(rank: int) -> str:
        return f"{first}&#10;rank {rank}: {_shape(placement.local_shapes[rank])} {last}"

    return tip


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"
