"""What a search found, and what it says of its end: no engines, only what they would report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.specs import TrainSpec, TuneSpec
from fsdp_magic.core.tuning import RoomReport, sizes_of
from fsdp_magic.core.units import MIB
from fsdp_magic.errors import OutOfMemoryOnRankError, UsageError
from fsdp_magic.notebook.probes import Probe, TunedStrategy
from fsdp_magic.notebook.rooms import Rooms
from fsdp_magic.notebook.search_endings import ending_of, nothing_fits
from fsdp_magic.notebook.tuned import Tuned
from fsdp_magic.notebook.tuning import Tuner


def probe(size: int, *, fits: bool = True, rate: float | None = None, **more: Any) -> Probe:
    return Probe(micro_batch_size=size, fits=fits, samples_per_second=rate, **more)


def row(name: str, size: int | None, *, rate: float | None = None, **more: Any) -> TunedStrategy:
    probes = [probe(size, rate=rate, peak_bytes=(7, 9))] if size else []
    return TunedStrategy(name=name, probes=probes, micro_batch_size=size, **more)


def tuned(*rows: TunedStrategy, objective: Any = "memory", use: Any = None) -> Tuned:
    made = Tuned(
        objective=objective, margin=0.05, world_size=2, names=(), is_table=True,
        is_endless=False, use=use or (lambda size: None),
    )  # fmt: skip
    made.table.extend(rows)
    return made


def test_the_best_strategy_has_the_largest_size() -> None:
    rows = [row("ddp", 4, rate=90.0), row("full_shard", 9, rate=50.0), row("zero1", 0)]
    assert getattr(tuned(*rows).best, "name", "") == "full_shard"
    assert getattr(tuned(*rows, objective="throughput").best, "name", "") == "ddp"
    assert tuned(row("zero1", 0), row("ddp", None, failure="no")).best is None


def test_of_equal_strategies_the_present_one_is_the_best() -> None:
    rows = [row("ddp", 9), row("full_shard", 9, is_present=True)]
    assert getattr(tuned(*rows).best, "name", "") == "full_shard"


def test_the_size_is_that_of_the_models_as_they_are_spread() -> None:
    found = tuned(row("ddp", 4, is_present=True, accumulate=3), row("full_shard", 9))
    assert (found.micro_batch_size, found.accumulate) == (4, 3)
    assert tuned(row("full_shard", 9, accumulate=2)).micro_batch_size == 9
    assert (tuned().micro_batch_size, tuned().accumulate) == (0, 1)
    assert repr(found) == "<Tuned: micro-batch 4 after 2 probes>"


def test_a_pick_has_the_figures_of_its_probe() -> None:
    each = row("ddp", 4, rate=90.0)
    each.probes += [probe(5, fits=False, rate=99.0), probe(3, rate=1.0)]
    assert (each.samples_per_second, each.peak_bytes) == (90.0, (7, 9))
    assert row("ddp", 0).picked is None
    assert row("ddp", None, failure="no").peak_bytes == ()


def test_a_chosen_size_is_handed_on() -> None:
    chosen: list[int] = []
    found = tuned(use=chosen.append)
    found.choose(3)
    assert chosen == [3]


def test_a_size_that_ran_out_is_not_handed_on_but_one_within_the_margin_is() -> None:
    chosen: list[int] = []
    each = row("ddp", 4, is_present=True)
    each.probes += [
        probe(5, fits=False, peak_bytes=(7, 9), load_bytes=9, why="leaves 1 % free"),
        probe(7, fits=False, why="runs out of memory on rank 1"),
        probe(9, fits=False, why="the data fill no step of it", is_end_of_data=True),
    ]
    found = tuned(row("zero1", 2), each, use=chosen.append)
    found.choose(6)
    for size in (7, 8):
        with pytest.raises(UsageError, match=r"^a micro-batch of 7 runs out of memory on rank 1; "):
            found.choose(size)
    assert chosen == [6]


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (0, "micro_batch_size 0 cannot work; it takes a whole number from 1"),
        (True, "micro_batch_size True cannot work"),
        (2.0, "micro_batch_size 2.0 cannot work"),
        ("4", "micro_batch_size '4' cannot work"),
        (9, "the data fill no step of 9; it takes up to 8"),
    ],
)
def test_what_is_no_size_is_refused_in_one_line(size: Any, says: str) -> None:
    chosen: list[int] = []
    found = tuned(use=chosen.append)
    found.most = 8
    with pytest.raises(UsageError) as caught:
        found.choose(size)
    assert says in str(caught.value)
    assert chosen == []


@pytest.mark.parametrize(
    ("most", "limit", "training", "sizes"),
    [
        (8, None, {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        (8, 3, {}, [1, 2, 3]),
        (2, 3, {}, [1, 2]),
        (None, 3, {}, [1, 2, 3]),
        (12, None, {"global_batch_size": 24}, [1, 2, 3, 4, 6, 12]),
        (12, 4, {"global_batch_size": 24}, [1, 2, 3, 4]),
        (5, None, {"global_batch_size": 24}, [1, 2, 3, 4]),
        (None, None, {"global_batch_size": 6, "data_sharding": "none"}, [1, 2, 3, 6]),
    ],
)
def test_the_sizes_are_those_of_which_steps_can_be_made(
    most: int | None, limit: int | None, training: dict[str, Any], sizes: list[int]
) -> None:
    spec = TrainSpec(data="d", **training)
    assert list(sizes_of(most, TuneSpec(max=limit), spec, ranks=2)) == sizes


def test_where_nobody_says_an_end_there_is_one() -> None:
    assert len(sizes_of(None, TuneSpec(), TrainSpec(data="d"), ranks=2)) == 1 << 20


ROOM = RoomReport(
    most_samples=64, room_bytes=100 * MIB, capacity_bytes=100 * MIB, held_bytes=0, other_bytes=0
)


def tuner(spec: TuneSpec, training: TrainSpec, found: Tuned, *, most: int | None = 64) -> Tuner:
    found.most = most
    sizes = sizes_of(most, spec, training, ranks=2)
    request = TrainRequest(code="loss = 1", name="<cell>", run_id=0, spec=training)
    rooms = Rooms({0: ROOM, 1: ROOM}, spec.margin)
    return Tuner(None, request, spec, found, rooms=rooms, sizes=sizes, show=False)  # type: ignore[arg-type]


RAN_OUT = probe(9, fits=False, why="runs out of memory on rank 1")
TOO_FULL = probe(9, fits=False, why="leaves 4.1 % free on rank 0", peak_bytes=(96, 95))
BEYOND = probe(9, fits=False, why="takes more than there is on rank 0", peak_bytes=(101, 95))
NO_DATA = probe(9, fits=False, why="the data fill no step of it", is_end_of_data=True)


@pytest.mark.parametrize(
    ("spec", "training", "probes", "ending"),
    [
        ({}, {}, [RAN_OUT], ("memory", "9 runs out of memory on rank 1")),
        (
            {},
            {},
            [probe(12, fits=False, why="worse"), TOO_FULL],
            ("memory", "9 leaves 4.1 % free on rank 0; --margin 0.05 keeps 5 %"),
        ),
        ({"margin": 0}, {}, [TOO_FULL], ("memory", "9 leaves 4.1 % free on rank 0")),
        ({}, {}, [BEYOND], ("memory", "9 takes more than there is on rank 0")),
        ({}, {}, [NO_DATA], ("the data", "the data fill no step of 9")),
        ({"max": 8}, {}, [], ("--max", "--max 8 ends the search")),
        ({}, {}, [], ("the data", "the data fill no larger step")),
        ({"max": 65}, {}, [], ("the data", "the data fill no larger step")),
        (
            {},
            {"global_batch_size": 16},
            [],
            ("the global batch", "it is a rank's whole part of the global batch"),
        ),
        (
            {"objective": "throughput"},
            {},
            [probe(16, rate=1.0), probe(32, fits=False, why="runs out")],
            ("speed", "larger sizes are not faster"),
        ),
        ({"objective": "throughput"}, {}, [RAN_OUT], ("memory", "9 runs out of memory on rank 1")),
    ],
)
def test_what_ended_a_search_is_said(
    spec: dict[str, Any], training: dict[str, Any], probes: list[Probe], ending: tuple[str, str]
) -> None:
    asked = TuneSpec(**spec)
    each = TunedStrategy(name="ddp", probes=[probe(8), *probes], micro_batch_size=8)
    assert ending_of(each, asked, TrainSpec(data="d", **training), most=64) == ending


@pytest.mark.parametrize(
    ("limit", "says"),
    [(None, "1,048,576 is the largest size that is tried"), (8, "--max 8 ends the search")],
)
def test_where_nobody_knows_how_far_data_go_they_ended_nothing(
    limit: int | None, says: str
) -> None:
    spec, training = TuneSpec(max=limit), TrainSpec(data="d")
    sizes = sizes_of(None, spec, training, ranks=2)
    each = TunedStrategy(name="ddp", probes=[probe(8)], micro_batch_size=8, sizes=sizes)
    assert ending_of(each, spec, training, most=None)[1] == says


@pytest.mark.parametrize(
    ("peaks", "load", "why"),
    [
        ((95 * MIB, 90 * MIB), 95 * MIB, ""),
        ((90 * MIB, 96 * MIB), 96 * MIB, "leaves 4.0 % free on rank 1"),
        ((90 * MIB, 151 * MIB), 101 * MIB, "takes more than there is on rank 2"),
    ],
)
def test_the_rank_nearest_to_its_end_decides(peaks: tuple[int, int], load: int, why: str) -> None:
    rooms = {0: ROOM, 1: ROOM}
    if "rank 2" in why:  # one with more room, and more than that
        larger = replace(ROOM, room_bytes=150 * MIB, capacity_bytes=150 * MIB)
        rooms, peaks, why = {0: ROOM, 1: larger}, peaks, why.replace("rank 2", "rank 1")
        load = round(0.95 * 100 * MIB + 151 * MIB - 0.95 * 150 * MIB)
    assert Rooms(rooms, 0.05).judged(peaks) == (load, why)


def test_where_nothing_fits_the_error_says_what_to_do() -> None:
    each = TunedStrategy(
        name="ddp", probes=[TOO_FULL], micro_batch_size=0, reason="it is full", sizes=range(1, 9)
    )
    error = nothing_fits(each, refused=None, ranks=2)
    assert isinstance(error, OutOfMemoryOnRankError)
    assert "not even a micro-batch of 1 fits: it is full; lower --margin, or" in str(error)
    assert "--strategy full_shard" in str(error)


@pytest.mark.parametrize(
    ("training", "size", "accumulate"),
    [
        ({"accumulate": 3}, 8, 3),
        ({"global_batch_size": 48}, 8, 3),
        ({"global_batch_size": 48, "data_sharding": "none"}, 8, 6),
        ({"global_batch_size": 48}, 0, 1),
    ],
)
def test_accumulation_makes_up_the_global_batch(
    training: dict[str, Any], size: int, accumulate: int
) -> None:
    made = tuner(TuneSpec(), TrainSpec(data="d", **training), tuned())
    assert made._accumulate(size) == accumulate
