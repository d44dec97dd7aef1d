"""What stands above the placement mosaic: the model in numbers, and how it was spread; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fsdp_magic.core.placement import Placement
from fsdp_magic.core.units import bytes_text, count_text, ranks_text
from fsdp_magic.panels.parts import shortened

_WHOLE = {
    "zero1": "parameters whole on each rank, the optimizer's state in shards",
    "ddp": "parameters, gradients and the optimizer's state whole on each rank",
    "hybrid_shard": "parameters, gradients and the optimizer's state whole on each rank",
}
"""Where nothing is gathered."""
_NUMBER = re.compile(r"(.*?\.)??(\d{1,9})((?:\..*)?)", re.DOTALL)
_MOST = 4
"""So many names of units, or ranks of copies, are listed; rows say the others."""


def summary(placement: Placement, held: Sequence[int]) -> str:
    """Return the model in numbers.

    Args:
        placement: of the model.
        held: bytes on each rank.
    """
    mean = sum(held) / max(1, len(held))
    uneven = mean and max(held) / mean >= 1.005
    balance = f" · fullest rank {max(held) / mean:.2f}× the mean" if uneven else ""
    return (
        f"{shortened(placement.strategy)} on {_counted(placement.world_size, 'rank')}"
        f"{_copies(placement)} · "
        f"{_counted(len(placement.parameters), 'tensor')} · "
        f"{count_text(placement.parameter_count)} parameters · "
        f"{bytes_text(placement.global_bytes)}{balance}"
    )


def manner(placement: Placement) -> str:
    """Return how the model was spread and how it computes, to be confirmed at a glance."""
    said = [_units(placement) or _WHOLE.get(placement.strategy, ""), _computes(placement)]
    if placement.activation_checkpointing:
        said.append(f"activation checkpointing: {placement.activation_checkpointing}")
    said += ["CPU offload"] if placement.cpu_offload else []
    said += ["compiled"] if placement.compiled else []
    return " · ".join(filter(None, said))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _copies(placement: Placement) -> str:
    """Return which ranks form each copy of what is sharded."""
    copies, world = placement.replicas, placement.world_size
    if copies < 2:
        return ""
    if copies >= world:
        return f" · {copies} copies, one on each rank"
    size = world // copies
    groups = [ranks_text(tuple(range(at, at + size))) for at in range(0, world, size)]
    if copies > _MOST:
        groups[_MOST - 1 : -1] = ["…"]
    return f" · {copies} copies: ranks {', '.join(groups)}"


def _units(placement: Placement) -> str:
    """Return what is gathered at once: the units by name, and the largest."""
    sizes = placement.unit_bytes
    if not sizes:
        return ""
    if set(sizes) == {""}:
        return "1 unit: the whole model"
    folded = _folded(name for name in sizes if name)
    more = f" and {len(folded) - _MOST} kinds more" if len(folded) > _MOST else ""
    listed = ", ".join([*map(shortened, folded[:_MOST])]) + more
    listed += ", the root" if "" in sizes else ""
    largest = max(sizes, key=lambda unit: sizes[unit])
    of = shortened(largest) or "the root"
    return (
        f"{_counted(len(sizes), 'unit')}: {listed}; the largest {bytes_text(sizes[largest])} ({of})"
    )


def _folded(names: Iterable[str]) -> list[str]:
    """Return names, those that differ in their first number alone as one: ``h.{0…5}.mlp``."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = _NUMBER.fullmatch(name)
        stem, rest = (match[1] or "", match[3]) if match else (name, "")
        of_stem = numbers.setdefault((stem, rest), [])
        if match:
            of_stem.append(int(match[2]))
    return [f"{stem}{_braced(sorted(found))}{rest}" for (stem, rest), found in numbers.items()]


def _braced(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}…{numbers[-1]}}}"
    if len(numbers) > _MOST:
        return f"{{{len(numbers)} of {numbers[0]}…{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def _computes(placement: Placement) -> str:
    """Return what the model computes in: a precision that was asked for, or that of its weights."""
    if placement.precision in ("bf16", "fp16"):
        return f"computes in {placement.precision}"
    dtypes = dict.fromkeys(parameter.dtype for parameter in placement.parameters)
    made = [dtype for dtype in dtypes if "float" in dtype or "complex" in dtype]
    return f"computes in {shortened(', '.join(made))}" if made else ""
