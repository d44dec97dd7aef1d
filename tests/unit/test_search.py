"""The search for a size is right for any memory that grows, whatever was planned, and soon ends."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from fsdp_magic.core.fastest_search import FastestSearch
from fsdp_magic.core.search import LargestSearch, Predicted, Tried, doubling_and_halving

ROOM = 1000.0
Curve = Callable[[int], float]

CURVES: dict[str, Callable[[float, float], Curve]] = {
    "affine": lambda held, each: lambda b: held + each * b,
    "b log b": lambda held, each: lambda b: held + each * b * (1 + 0.1 * math.log(b)),
    "kink": lambda held, each: lambda b: max(held + each * b, 1.3 * held + 0.5 * each * b),
    "steps of 16": lambda held, each: lambda b: held + each * 16 * math.ceil(b / 16),
}
PLANS: dict[str, Callable[[Curve, Curve], Predicted | None]] = {
    "none": lambda real, affine: None,
    "right": lambda real, affine: real,
    "0.3 % more": lambda real, affine: lambda b: 1.003 * affine(b),
    "half": lambda real, affine: lambda b: 0.5 * affine(b),
    "twice": lambda real, affine: lambda b: 2 * affine(b),
    "a 64th": lambda real, affine: lambda b: affine(b) / 64,
    "64 times": lambda real, affine: lambda b: 64 * affine(b),
    "lacks a constant": lambda real, affine: lambda b: real(b) - 50,
    "lacks of each sample": lambda real, affine: lambda b: affine(0) + 0.6 * (real(b) - affine(0)),
}


def lists_of_sizes(draw: random.Random) -> Sequence[int]:
    """Return sizes that may be tried: all up to an end, the parts of a global batch, or one."""
    whole = draw.choice([48, 1024, 1000, 5040])
    parts = [size for size in range(1, whole + 1) if whole % size == 0]
    end = draw.choice([1, 3, 10, 50, 400, 5000, 25_000])
    return draw.choice([range(1, end + 1), range(1, end + 1), range(1, end + 1), parts, [7]])


def tried(
    sizes: Sequence[int],
    memory: Curve,
    plan: Predicted | None,
    *,
    known: float = 1.0,
    held: float = 0.0,
) -> list[int]:
    """Search, check what holds for every search, and return the sizes in the order of their trial.

    Args:
        sizes: that may be tried.
        memory: of any size.
        plan: the same as planned.
        known: up to so many times the room a peak is known of a size that does not fit.
        held: before any step.
    """
    search = LargestSearch(sizes, room=ROOM, rest=held, predicted=plan, first=8)
    made: list[int] = []
    while (size := search.next()) is not None:
        assert size in sizes
        assert size not in made
        made.append(size)
        peak = memory(size)
        search.add(Tried(size=size, fits=peak <= ROOM, peak=peak if peak <= known * ROOM else None))
    fitting = bisect.bisect_right(sizes, ROOM, key=memory)
    assert search.largest == (sizes[fitting - 1] if fitting else 0)
    assert {*sizes[max(0, fitting - 1) : fitting + 1]} <= {*made}, "it, or the next, was not tried"
    assert len(made) <= doubling_and_halving(fitting, len(sizes)) + 3
    return made


def cases(number: int, seed: int = 0) -> list[tuple[Sequence[int], float, float, float]]:
    """Return sizes, what is held, what each sample takes, and up to where peaks are known."""
    draw = random.Random(seed)
    return [
        (
            lists_of_sizes(draw),
            draw.uniform(0, 1) * ROOM,
            10 ** draw.uniform(-2, 2.5),
            draw.choice([1.0, 1.05, 100.0]),
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize(("curve", "plan"), list(product(CURVES, PLANS)))
def test_the_largest_that_fits_is_found_and_the_next_seen_not_to(curve: str, plan: str) -> None:
    """Also: no size is tried twice, none beyond the end, few beyond doubling and halving."""
    for sizes, held, each, known in cases(30):
        real = CURVES[curve](held, each)
        planned = PLANS[plan](real, CURVES["affine"](held, each))
        tried(sizes, real, planned, known=known, held=held / 2)


def test_no_plan_and_no_memory_costs_more_than_three_sizes_beyond_doubling_and_halving() -> None:
    """Plans and peaks are drawn: they grow, and say nothing."""
    draw = random.Random(1)
    for _ in range(300):
        sizes = range(1, draw.choice([1, 2, 3, 7, 40, 300, 2000]) + 1)
        fitting = draw.randint(0, len(sizes))
        beneath, above = draw.choice([0.1, 3.0, 30.0]), draw.choice([0.01, 0.5])

        def memory(
            size: int, last: int = fitting, power: float = beneath, rise: float = above
        ) -> float:
            share = size / (last + 1)
            return ROOM * (share**power if size <= last else 1.001 + rise * share)

        power = draw.choice([0.1, 1.0, 10.0])
        border = draw.randint(1, 2 * len(sizes))
        tried(
            sizes,
            memory,
            lambda b, at=border, p=power: ROOM * (b / at) ** p,
            known=draw.choice([1, 2]),
        )


AFFINE = [case for case in cases(150, seed=2) if case[0][-1] > 7]


@pytest.mark.parametrize(
    ("plan", "most"),
    [("right", 2), ("0.3 % more", 4), ("twice", 3), ("64 times", 3), ("half", 4), ("a 64th", 4)],
)
def test_few_sizes_are_tried_where_memory_is_affine(plan: str, most: int) -> None:
    for sizes, held, each, known in AFFINE:
        real = CURVES["affine"](held, each)
        assert len(tried(sizes, real, PLANS[plan](real, real), known=known)) <= most


def test_a_plan_that_is_right_within_one_percent_costs_at_most_five_sizes() -> None:
    draw = random.Random(3)
    for sizes, held, each, known in AFFINE:
        of_held, of_each = draw.uniform(0.99, 1.01), draw.uniform(0.99, 1.01)
        plan = CURVES["affine"](of_held * held, of_each * each)
        assert len(tried(sizes, CURVES["affine"](held, each), plan, known=known)) <= 5


@pytest.mark.parametrize("plan", PLANS)
def test_affine_memory_costs_at_most_two_beyond_doubling_and_halving(plan: str) -> None:
    """A plan that is right, or says too much, costs none."""
    spare = {"twice": 0, "64 times": 0, "right": 0, "0.3 % more": 0}
    for sizes, held, each, known in AFFINE:
        real = CURVES["affine"](held, each)
        made = tried(sizes, real, PLANS[plan](real, real), known=known, held=held / 2)
        fitting = bisect.bisect_right(sizes, ROOM, key=real)
        assert len(made) <= doubling_and_halving(fitting, len(sizes)) + spare.get(plan, 2)


def test_doubling_and_halving_is_counted_as_it_is_done() -> None:
    for end, answer in ((e, a) for e in (1, 2, 3, 8, 13, 64) for a in range(e + 1)):
        sizes = range(1, end + 1)
        search, low, made = LargestSearch(sizes, room=1), 0, 0
        while (size := search.next()) is not None:
            made += 1
            search.add(Tried(size=size, fits=size <= answer, peak=None))
            low = max(low, size if size <= answer else 0)
        assert search.largest == low == answer
        most = doubling_and_halving(answer, end)
        assert made <= most <= doubling_and_halving(answer) or answer in (0, end)
        assert made == most or end & (end - 1), "where the end is no power of two it may be fewer"


def test_a_plan_that_says_that_all_fit_begins_at_the_end() -> None:
    assert tried(range(1, 33), lambda b: 10.0 * b, lambda b: 9.0 * b) == [32]


def test_a_plan_that_says_that_nothing_fits_begins_at_the_beginning() -> None:
    assert tried(range(1, 33), lambda b: 2 * ROOM, lambda b: 3 * ROOM) == [1]


def test_a_right_plan_is_confirmed_by_the_size_and_the_next() -> None:
    assert tried(range(1, 1000), lambda b: 100.0 + 9 * b, lambda b: 100.0 + 9 * b) == [100, 101]


def test_a_single_sample_is_left_alone_where_two_fit() -> None:
    """Batch norm refuses it; after a size that ran out the next one is two samples."""
    made = tried(range(1, 1000), lambda b: 100.0 + 9 * b, lambda b: 50.0 + 4.5 * b)
    assert made == [211, 2, 100, 101]
    assert tried(range(1, 1000), lambda b: 500.0 * b, lambda b: 10.0 * b)[:2] == [100, 2]
    assert tried(range(1, 1000), lambda b: 600.0 * b, lambda b: 10.0 * b) == [100, 2, 1]


def test_a_plan_that_lacks_a_constant_is_shifted_by_what_was_measured() -> None:
    plan: Predicted = lambda b: 60.0 + 9 * b  # noqa: E731
    assert tried(range(1, 1000), lambda b: 100.0 + 9 * b, plan, known=1.05) == [104, 100, 101]


def test_where_memory_bends_it_takes_few_sizes_in_the_mean() -> None:
    """A search that trusts its estimates for ever, or lines through far sizes, takes more."""
    draw, sizes, numbers = random.Random(4), range(1, 5001), []
    for _ in range(20):
        held, about = draw.uniform(0, 800), draw.randint(50, 4000)
        for curve, plan in product(CURVES, PLANS):
            each = (ROOM - held) / about
            real, affine = CURVES[curve](held, each), CURVES["affine"](held, each)
            numbers.append(len(tried(sizes, real, PLANS[plan](real, affine), held=held / 2)))
    assert sum(numbers) / len(numbers) < 6.5


def fastest(
    sizes: Sequence[int], rate: Callable[[int], float], *, end: int | None = None
) -> tuple[int, list[int]]:
    """Search for the fastest size; return it and what was tried; beyond an end nothing fits."""
    search, made = FastestSearch(sizes), list[int]()
    while (size := search.next()) is not None:
        assert size in sizes
        assert size not in made
        made.append(size)
        fits = end is None or size <= end
        search.add(size, fits=fits, rate=rate(size) if fits else None)
    assert len(made) <= 2 * len(sizes).bit_length() + 2
    return search.fastest, made


def test_where_more_is_always_faster_the_largest_is_taken() -> None:
    assert fastest(range(1, 101), lambda b: 10.0 * b) == (100, [1, 2, 4, 8, 16, 32, 64, 100])


def test_on_a_plateau_the_smallest_size_is_taken_and_the_search_ends() -> None:
    picked, made = fastest(range(1, 10_001), lambda b: 10.0 * min(b, 16))
    assert picked == 16
    assert max(made) <= 64


def test_where_more_is_slower_the_smallest_is_taken() -> None:
    assert fastest(range(1, 10_001), lambda b: 10.0 / b) == (1, [1, 2, 4])


def test_two_slow_sizes_apart_do_not_end_the_search() -> None:
    picked, _ = fastest(range(1, 65), lambda b: 1.0 if b in (4, 16) else 10.0 * b)
    assert picked == 64


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_one_percent_costs_little_speed(seed: int) -> None:
    draw = random.Random(seed)

    def real(size: int) -> float:
        return 100.0 * size / (size + 5)

    picked, made = fastest(range(1, 201), lambda b: real(b) * draw.uniform(0.99, 1.01))
    assert real(picked) >= 0.95 * max(map(real, made))


@pytest.mark.parametrize("end", [0, 1, 2, 3, 5, 13, 21, 64, 100])
def test_sizes_for_which_memory_ends_are_left_alone(end: int) -> None:
    picked, made = fastest(range(1, 101), lambda b: 10.0 * b, end=end)
    assert picked <= end
    assert picked >= 0.75 * end, "what lies between the last doubling and the end is looked at"
    assert sum(size > end for size in made) <= 3


def test_no_more_is_tried_between_sizes_where_doubling_had_stopped_to_help() -> None:
    assert fastest(range(1, 101), lambda b: 10.0 * min(b, 4), end=8) == (4, [1, 2, 4, 8, 16])


@pytest.mark.parametrize(("sizes", "picked"), [([7], 7), ([1], 1), ([1, 2, 3, 4, 6, 12], 12)])
def test_any_list_of_sizes_is_searched(sizes: list[int], picked: int) -> None:
    assert fastest(sizes, lambda b: 10.0 * b)[0] == picked
    assert fastest(sizes, lambda b: 10.0, end=0)[0] == 0
