"""Collectives compared over the ranks of a group, whoever comes second, without a false alarm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from fsdp_magic.engine.collectives import (
    UNITS,
    Collective,
    CollectiveLog,
    DivergedError,
    collective,
)

BARRIER, OTHER = Collective("barrier"), Collective("allreduce", numbers=4, dtype=torch.float32)


@pytest.fixture
def logs(tmp_path: Path) -> list[CollectiveLog]:
    path = tmp_path / "log"
    CollectiveLog.new_file(path, 3)
    return [CollectiveLog(path, rank, 3) for rank in range(3)]


def test_equal_collectives_pass_however_often_they_go_round(logs: list[CollectiveLog]) -> None:
    for number in range(200):
        for log in logs:
            log.note(BARRIER if number % 3 else OTHER)
    assert logs[0].diverged is None


@pytest.mark.parametrize("second", [1, 2])
def test_whoever_comes_second_sees_that_another_did_something_else(
    logs: list[CollectiveLog], second: int
) -> None:
    logs[0].note(BARRIER)
    logs[second].note(BARRIER)
    logs[0].note(BARRIER)
    with pytest.raises(DivergedError) as caught:
        logs[second].note(OTHER)
    assert (caught.value.issued, caught.value.peer) == ("calls all_reduce of 4 float32", 0)
    assert logs[0].diverged == BARRIER
    assert logs[3 - second].diverged is None, "it has not come there"


def test_a_rank_may_be_far_ahead_of_another(logs: list[CollectiveLog]) -> None:
    for _ in range(500):
        logs[0].note(OTHER)
    logs[1].note(BARRIER)  # too old to be compared, which is no alarm
    assert logs[0].missing() == (1, 2)
    assert logs[1].missing() == (2,)


def test_numbers_go_round_without_a_false_alarm(logs: list[CollectiveLog]) -> None:
    for log in logs:
        log._sequence = 0xFFFFFFFE
    for _ in range(4):
        for log in logs:
            log.note(OTHER)
    assert all(log.missing() == () for log in logs)


def test_what_was_refused_before_it_was_sent_does_not_count(logs: list[CollectiveLog]) -> None:
    logs[0].note(OTHER)
    logs[0].take_back()
    logs[1].note(BARRIER)
    logs[0].note(BARRIER)
    assert logs[0].missing() == (2,)


def test_what_must_be_equal_is_told_apart_and_no_more() -> None:
    def of(call: str, *args: object) -> Collective:
        return collective(call, args)

    four, five, ints = torch.ones(4), torch.ones(5), torch.ones(4, dtype=torch.int64)
    reduce, largest = c10d.AllreduceOptions(), c10d.AllreduceOptions()
    largest.reduceOp = c10d.ReduceOp.MAX
    root = c10d.BroadcastOptions()
    root.rootRank = 1
    different = [
        of("allreduce", [four], reduce),
        of("allreduce", [five], reduce),
        of("allreduce", [ints], reduce),
        of("allreduce", [four], largest),
        of("broadcast", [four], c10d.BroadcastOptions()),
        of("broadcast", [four], root),
        of("_allgather_base", torch.ones(8), four, None),
        of("barrier"),
    ]
    assert len(set(different)) == len(different)
    assert of("alltoall_base", five, four, [4, 1], [2, 2]) == of(
        "alltoall_base", four, five, [], []
    )
    # with uneven parts, what all ranks agree on is the whole
    assert of("allgather", [[four, five]], [four]) == of("allgather", [[four, five]], [five])
    assert of("reduce_scatter", [four], [[four, five]]) == of(
        "reduce_scatter", [five], [[four, five]]
    )
    assert of("gather", [[four, four]], [four]) == of("gather", [], [four])
    assert of("scatter", [four], [[four, four]]) == of("scatter", [four], [])


def test_a_unit_names_its_collectives_and_only_those() -> None:
    def gather() -> Collective:
        return collective("_allgather_base", (torch.ones(8),))

    def gather_beside() -> Collective:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(gather).result()

    assert UNITS.naming("model.h.0", gather)().text == "gathers `model.h.0`"
    assert UNITS.naming("model.h.0", gather_beside)().unit == "", "that of another thread"
    assert collective("_allgather_base", (torch.ones(8),)).text == "calls all_gather of 8 float32"
