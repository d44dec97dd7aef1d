"""ENGINE: two passes of different batch sizes made into one, whose sizes are polynomials.

Both allocate the same in the same order, so each allocation is a polynomial in the batch size:
constant if no dim of its shape changed, linear if one did, quadratic if two did.
"""

from __future__ import annotations

from itertools import zip_longest

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.step_trace import Allocated, Event, Freed, Size
from fsdp_magic.engine.planning.passes import Pass
from fsdp_magic.engine.planning.tracker import Taken

_END = Taken(-1, 0, (), "temporary", "", "nothing more")


def first_difference(small: Pass, large: Pass) -> tuple[Taken, Taken] | None:
    """Return the first allocations in which two passes differ by more than size; None: in none."""
    for pair in zip_longest(_taken(small), _taken(large), fillvalue=_END):
        first, second = pair
        if (first.operator, first.place, first.kind) != (
            second.operator,
            second.place,
            second.kind,
        ):
            return pair
    return None


def differing(small: Pass, large: Pass, pair: tuple[Taken, Taken]) -> FsdpError:
    """Return what a person is told whose cell computes differently by batch size."""
    first, second = (_described(each) for each in pair)
    return FsdpError(
        f"what the cell computes depends on the batch size: {first} with {small.samples} samples, "
        f"{second} with {large.samples}; a plan needs a cell that does the same for any"
    )


def aligned(small: Pass, large: Pass) -> tuple[Event, ...]:
    """Return the larger of two passes, its sizes as polynomials.

    Args:
        small: run just before the larger one, which frees what it left.
        large: it allocates the same.
    """
    sizes = {
        second.id: _size(first, second, small.samples, large.samples)
        for first, second in zip(_taken(small), _taken(large), strict=True)
    }
    number = {event.id: n for n, event in enumerate(_taken(large))}
    carried = {event.id: n for n, event in enumerate(_taken(small))}
    events: list[Event] = []
    for event in large.events:
        if isinstance(event, Taken):
            size = sizes[event.id]
            events.append(
                Allocated(number[event.id], size, event.kind, event.place, event.operator)
            )
        elif not isinstance(event, Freed):
            events.append(event)
        elif event.id in number:
            events.append(Freed(number[event.id]))
        elif event.id in carried:
            events.append(Freed(carried[event.id], carried=True))
    return tuple(events)


def linear(small: float, large: float, sizes: tuple[int, int]) -> Size:
    """Return the line through the values at two batch sizes."""
    first, second = sizes
    slope = (large - small) / (second - first)
    return Size(small - slope * first, slope)


def _taken(run: Pass) -> list[Taken]:
    return [event for event in run.events if isinstance(event, Taken)]


def _size(small: Taken, large: Taken, first: int, second: int) -> Size:
    """Return the polynomial that two sizes are on."""
    if small.bytes == large.bytes:
        return Size(float(large.bytes))
    if _degree(small.shape, large.shape, second / first) >= 2:
        pair = (large.bytes - small.bytes) / (second**2 - first**2)
        return Size(small.bytes - pair * first**2, 0.0, pair)
    return linear(small.bytes, large.bytes, (first, second))


def _degree(small: tuple[int, ...], large: tuple[int, ...], ratio: float) -> int:
    """Return in which power of the batch size a tensor grows; a dim of b * b counts twice."""
    changed = [(a, b) for a, b in zip(small, large, strict=False) if a != b]
    return sum(2 if b == a * ratio**2 else 1 for a, b in changed)


def _described(taken: Taken) -> str:
    return f"{taken.operator}{f' in {taken.place}' if taken.place else ''}"
