"""ENGINE: what an optimizer took for two stand-ins of a parameter, as a size for the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fsdp_magic.engine.planning.tracker import Taken

Shapes = Mapping[str, tuple[int, ...]]
"""Of parameters or their stand-ins, by name."""


def size_of(
    pair: tuple[Taken, Taken], stand_ins: Sequence[Shapes], whole: Shapes
) -> tuple[float, float]:
    """Return bytes an element of a parameter, and fixed ones, of what two stand-ins took.

    Args:
        pair: what was taken for the smaller stand-in, and for the larger one.
        stand_ins: the shapes of both runs.
        whole: the shapes of the parameters.
    """
    owner = pair[1].place
    shapes = [each.get(owner, ()) for each in stand_ins]
    dims = [_dims_in(taken.shape, shape) for taken, shape in zip(pair, shapes, strict=True)]
    if owner in whole and dims[0] == dims[1] and dims[0] and len(dims[0]) < len(shapes[0]):
        item = pair[1].bytes / math.prod(pair[1].shape)
        size = item * math.prod(whole[owner][dim] for dim in dims[0])
        # dim 0 is that which ranks have a part of
        return (size / math.prod(whole[owner]), 0.0) if 0 in dims[0] else (0.0, size)
    small, large = (
        (math.prod(shape) if owner in each else 0, taken.bytes)
        for shape, each, taken in zip(shapes, stand_ins, pair, strict=True)
    )
    return _line(small, large)


def _dims_in(shape: Sequence[int], stand_in: Sequence[int]) -> tuple[int, ...]:
    """Return which dims of a stand-in a shape has, in order; none, if it has others too."""
    lengths = [length for length in shape if length != 1]
    if not set(lengths) <= set(stand_in):
        return ()
    return tuple(list(stand_in).index(length) for length in lengths)


def _line(small: tuple[int, int], large: tuple[int, int]) -> tuple[float, float]:
    """Return bytes an element and fixed ones, from elements and bytes of two sizes."""
    if small[0] == large[0]:  # a scalar
        return 0.0, float(large[1])
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return slope, large[1] - slope * large[0]
