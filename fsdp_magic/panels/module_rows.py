"""The parameters of a placement as rows of modules, equal consecutive blocks as one; pure.

A *block* is what a name holds up to its first number (``transformer.h.3``), or without a number
the module that owns the parameter. Blocks that follow each other, differ in the number alone and
hold the same tensors in the same places fold into one row: ``transformer.h.{0…47} ×48``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_magic.core.placement import ParameterPlacement

_BLOCK = re.compile(r"((?:.*?\.)??)(\d{1,9})\.(.+)", re.DOTALL)

Signature = tuple[tuple[object, ...], ...]
Held = tuple[int, int]
"""Bytes on one rank: (sharded, replicated)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter and its name inside its block."""

    name: str
    placement: ParameterPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One row: a block, or equal consecutive blocks.

    Attributes:
        stem: the blocks' name up to their number; the whole name if they have none.
        numbers: of the folded blocks; empty if the block has none.
        tensors: of the first block.
        held: on each rank, in all its blocks.
    """

    stem: str
    numbers: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    held: tuple[Held, ...]

    @property
    def blocks(self) -> int:
        """How many blocks it stands for."""
        return max(1, len(self.numbers))

    @property
    def name(self) -> str:
        """``transformer.h.{0…47}``."""
        numbers = self.numbers
        if len(numbers) < 2:
            return self.stem + "".join(numbers)
        run = [int(number) for number in numbers]
        if run == list(range(run[0], run[0] + len(run))) or len(run) > 4:
            return f"{self.stem}{{{numbers[0]}…{numbers[-1]}}}"
        return f"{self.stem}{{{','.join(numbers)}}}"

    @property
    def units(self) -> tuple[str, ...]:
        """What its sharded tensors are gathered with: names of units; the root is ``""``."""
        first = self.stem + "".join(self.numbers[:1])
        found = [t.placement.unit for t in self.tensors if t.placement.kind == "sharded"]
        return tuple(
            dict.fromkeys(
                self.name + unit.removeprefix(first) if _is_within(unit, first) else unit
                for unit in found
            )
        )

    @property
    def total_bytes(self) -> int:
        """Bytes on all ranks."""
        return sum(sharded + replicated for sharded, replicated in self.held)


@dataclass(slots=True, kw_only=True)
class _Block:
    stem: str
    numbers: list[str]
    tensors: list[Tensor]

    def signature(self) -> Signature:
        """Return what must be equal for blocks to fold."""
        name = self.stem + "".join(self.numbers[:1])
        return tuple(
            (tensor.name, p.shape, p.local_shapes, p.dtype, p.element_bytes, p.kind, unit)
            for tensor in self.tensors
            for p in (tensor.placement,)
            for unit in (p.unit.replace(name, ".", 1) if _is_within(p.unit, name) else p.unit,)
        )


def module_rows(parameters: Sequence[ParameterPlacement]) -> list[ModuleRow]:
    """Return the rows, in the order of their first parameters."""
    blocks: dict[tuple[str, str], _Block] = {}
    for parameter in parameters:
        stem, number, name = _split(parameter.name)
        numbers = [number] if number else []
        block = blocks.setdefault((stem, number), _Block(stem=stem, numbers=numbers, tensors=[]))
        block.tensors.append(Tensor(name=name, placement=parameter))
    folded: list[_Block] = []
    for block in blocks.values():
        last = folded[-1] if folded else None
        if (
            last is not None
            and block.numbers
            and last.stem == block.stem
            and last.signature() == block.signature()
        ):
            last.numbers += block.numbers
        else:
            folded.append(block)
    return [_row(block) for block in folded]


def held_bytes(parameter: ParameterPlacement) -> list[Held]:
    """Return a parameter's bytes on each rank."""
    if parameter.kind == "replicated":
        return [(0, size) for size in parameter.local_bytes]
    return [(size, 0) for size in parameter.local_bytes]


def rank_groups(parameters: Sequence[ParameterPlacement], world_size: int) -> list[range]:
    """Return runs of consecutive ranks that hold the same shape of every parameter.

    ``torch.chunk`` gives all ranks but the last few the same rows, so there are few.
    """
    shapes = {parameter.local_shapes for parameter in parameters}
    starts = [0]
    starts += [rank for rank in range(1, world_size) if any(s[rank] != s[rank - 1] for s in shapes)]
    ends = [*starts[1:], world_size]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def _is_within(unit: str, block: str) -> bool:
    """Return whether a unit is a block or a part of it."""
    return unit == block or unit.startswith(f"{block}.")


def _split(name: str) -> tuple[str, str, str]:
    """Return stem, number and rest of a dotted name."""
    match = _BLOCK.fullmatch(name)
    if match:
        return match[1], match[2], match[3]
    owner, _, own = name.rpartition(".")
    return (owner, "", own) if owner else (own, "", own)


def _row(block: _Block) -> ModuleRow:
    times = max(1, len(block.numbers))
    by_tensor = [held_bytes(tensor.placement) for tensor in block.tensors]
    held = tuple(
        (times * sum(sharded for sharded, _ in rank), times * sum(whole for _, whole in rank))
        for rank in zip(*by_tensor, strict=True)
    )
    return ModuleRow(
        stem=block.stem,
        numbers=tuple(block.numbers),
        tensors=tuple(block.tensors),
        held=held,
    )
