"""Pairwise coverings of the tests' matrices."""

from __future__ import annotations

from itertools import product

from coverings import covering, pairs_of

AXES = (("a", "b", "c"), (1, 2), (True, False), range(4))


def test_all_pairs_meet_in_few_cases() -> None:
    chosen = covering(*AXES)
    met = set().union(*map(pairs_of, chosen))
    assert met == set().union(*map(pairs_of, product(*AXES)))
    assert len(chosen) <= 14, "of 48; the two longest axes alone need 12"
    assert len(set(chosen)) == len(chosen)
