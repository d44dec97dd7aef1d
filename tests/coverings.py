"""Pairwise coverings: every two values of different axes meet; the whole product is nightly's."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, Any], tuple[int, Any]]


def pairs_of(case: tuple[Any, ...]) -> set[Pair]:
    """Return the pairs of values, with their axes, that meet in a case."""
    (*found,) = combinations(enumerate(case), 2)
    return set(found)


def covering(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Return cases of a product in which all pairs meet: the one with most new pairs comes next."""
    left = set().union(*map(pairs_of, product(*axes)))
    chosen = []
    while left:
        case = max(product(*axes), key=lambda case: len(pairs_of(case) & left))
        chosen.append(case)
        left -= pairs_of(case)
    return chosen


def pairwise(**axes: Collection[Any]) -> pytest.MarkDecorator:
    """Run a test on a covering of its arguments' values, and on all of them by ``make nightly``."""
    chosen = covering(*axes.values())
    cases = [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.nightly)
        for case in product(*axes.values())
    ]
    return pytest.mark.parametrize(",".join(axes), cases)
