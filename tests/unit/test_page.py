"""The shared page: words that hold a whole vote, and slots that nobody overwrites unread."""

import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_magic.core.page import COUNT_BITS, FLAG_BITS, NUMBER_BITS, Ballot, Page, page_bytes
from fsdp_magic.engine.interrupts import ReleasedByPeerError
from fsdp_magic.engine.vote import Flag, Vote

VOTER = """
import mmap, sys, time
from fsdp_magic.core.page import Page
from fsdp_magic.engine.vote import Flag, Vote

path, rank, ranks, votes = sys.argv[1], *map(int, sys.argv[2:])
with open(path, "r+b") as file:
    page = Page(memoryview(mmap.mmap(file.fileno(), 0)).cast("Q"))
vote = Vote(page, rank, world_size=ranks, generation=1)
for number in range(votes):
    if number % 997 == 100 * rank:
        time.sleep(0.001)  # so that each rank is the slowest now and then
    mine = Flag.STOP if number % ranks == rank else Flag.NONE
    flags, count = vote.take(mine, count=number + rank)
    assert flags == Flag.STOP, (number, flags)
    assert count == ranks * number + ranks * (ranks - 1) // 2, (number, count)
"""


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    path.write_bytes(bytes(page_bytes(3)))
    return path


@pytest.fixture
def page(page_file: Path) -> Iterator[Page]:
    with open(page_file, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        words = memoryview(mapped).cast("Q")
        yield Page(words)
        words.release()


@pytest.mark.parametrize("number", [0, 1, 2**NUMBER_BITS - 1])
@pytest.mark.parametrize("flags", [0, 3, 2**FLAG_BITS - 1])
@pytest.mark.parametrize("count", [0, 1, 2**COUNT_BITS - 1])
def test_a_vote_fits_one_word_and_comes_back_whole(number: int, flags: int, count: int) -> None:
    ballot = Ballot(number=number, flags=flags, count=count)
    assert 0 <= ballot.word() < 2**64
    assert Ballot.of(ballot.word()) == ballot


@pytest.mark.parametrize("count", [-1, 2**COUNT_BITS])
def test_a_count_that_does_not_fit_is_refused(count: int) -> None:
    with pytest.raises(OverflowError, match=str(count)):
        Ballot(number=1, flags=0, count=count).word()


def test_a_fresh_page_holds_no_vote_no_stop_and_no_release(page: Page) -> None:
    assert page.released_generation == 0
    assert page.stopping_run == 0
    assert page.ballot(2, 1).number == 0


def test_a_rank_writes_only_into_its_own_slots(page: Page) -> None:
    for number in (1, 2):
        for rank in range(3):
            page.cast(rank, Ballot(number=number, flags=rank, count=10 * rank + number))
    for number in (1, 2):
        for rank in range(3):
            ballot = Ballot(number=number, flags=rank, count=10 * rank + number)
            assert page.ballot(rank, number) == ballot
    page.clear_ballots(1)
    assert [page.ballot(rank, 2).number for rank in range(3)] == [2, 0, 2]


def test_a_vote_stands_until_the_one_after_the_next(page: Page) -> None:
    page.cast(0, Ballot(number=1, flags=0, count=5))
    page.cast(0, Ballot(number=2, flags=0, count=6))
    assert page.ballot(0, 1).count == 5


def test_an_older_generation_never_takes_back_a_release(page: Page) -> None:
    page.release(3)
    page.release(2)
    assert page.released_generation == 3


def test_stopping_and_releasing_are_words_of_their_own(page: Page) -> None:
    page.stop(7)
    page.release(2)
    assert (page.stopping_run, page.released_generation) == (7, 2)


def test_a_generation_is_quiet_once_every_rank_is_quiet_or_idle(page: Page) -> None:
    assert not page.all_quiet(1)
    page.note_idle(0)
    page.note_quiet(1, 4)
    page.note_quiet(2, 3)
    assert (page.all_quiet(3), page.all_quiet(4)) == (True, False)
    page.note_quiet(0, 4)  # an idle one stays idle, whatever it lets go of
    page.note_quiet(2, 9)
    page.note_quiet(1, 9)
    assert page.all_quiet(9)
    page.note_busy(0)
    assert not page.all_quiet(1)


def test_being_quiet_and_voting_are_words_of_their_own(page: Page) -> None:
    page.note_idle(0)
    page.cast(0, Ballot(number=1, flags=1, count=2))
    page.cast(0, Ballot(number=2, flags=3, count=4))
    assert [page.ballot(0, n).count for n in (1, 2)] == [2, 4]
    page.clear_ballots(0)
    page.note_idle(1)
    page.note_idle(2)
    assert page.all_quiet(1)


def test_processes_read_every_ballot_before_it_is_overwritten(page_file: Path) -> None:
    voters = [
        subprocess.Popen(
            [sys.executable, "-c", VOTER, str(page_file), str(rank), "3", "3000"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        errors = [voter.communicate(timeout=30)[1] for voter in voters]
    finally:
        for voter in voters:
            voter.kill()
            voter.communicate()
    assert errors == ["", "", ""]


def test_threads_read_every_ballot_before_it_is_overwritten(page: Page) -> None:
    wrong: list[object] = []

    def vote(rank: int) -> None:
        votes = Vote(page, rank, world_size=3, generation=1)
        try:
            for number in range(300):
                got = votes.take(Flag(rank & 1), count=number)
                if got != (Flag.STOP, 3 * number):
                    wrong.append((rank, number, got))
        except ReleasedByPeerError:
            wrong.append((rank, "never saw a peer's vote"))

    threads = [threading.Thread(target=vote, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    page.release(1)  # whoever still waits has missed a vote
    for thread in threads:
        thread.join()
    assert wrong == []


def test_numbers_go_round_without_the_number_of_an_empty_slot(page: Page) -> None:
    alone = Vote(page, 0, world_size=1, generation=1)
    seen = set()
    for _ in range(2**NUMBER_BITS + 5):
        alone.take()
        seen.add(alone._number)
    assert 0 not in seen
    assert max(seen) < 2**NUMBER_BITS


def test_going_round_keeps_the_two_slots_alternating(page: Page) -> None:
    alone = Vote(page, 0, world_size=1, generation=1)
    before = None
    for _ in range(2**NUMBER_BITS + 5):
        alone.take()
        assert before is None or alone._number % 2 != before % 2
        before = alone._number


def test_waiting_ends_when_the_transports_are_given_up(page: Page) -> None:
    page.release(1)
    with pytest.raises(ReleasedByPeerError):
        Vote(page, 0, world_size=2, generation=1).take()


def test_an_old_release_does_not_end_a_new_generations_vote(page: Page) -> None:
    page.release(1)
    page.cast(1, Ballot(number=1, flags=0, count=4))
    assert Vote(page, 0, world_size=2, generation=2).take(count=3) == (Flag.NONE, 7)
