"""Who is told that ranks wait for each other, when, and what the table looks like."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from panel_records import view

from fsdp_magic.core.page import Page, page_bytes
from fsdp_magic.core.reply import Failure
from fsdp_magic.core.whereabouts import Whereabouts, WhereReport
from fsdp_magic.notebook.stacks import Stacks
from fsdp_magic.notebook.waiting import SILENT, WaitingWatch
from fsdp_magic.panels import training, waiting

COMPUTES = Whereabouts(line=3, source="y = slow(x)")
READS = Whereabouts(doing="reads data")
WAITS = Whereabouts(line=5, source="model(x)", doing="gathers `model`", missing=(0,), seconds=7.0)


class Ranks:
    """Ranks that answer each question at once, as long as they are not silent."""

    def __init__(self, places: Mapping[int, Whereabouts], *, process: int = 0) -> None:
        self.page = Page(memoryview(bytearray(page_bytes(2))).cast("Q"))
        pids = dict.fromkeys(places, process)
        self.watch = WaitingWatch(page=self.page, stacks=Stacks(directory=Path(), pids=pids))
        self.places = dict(places)
        self.left: set[int] = set()
        self.silent: set[int] = set()
        self.now, self.questions = 0.0, 0

    def after(self, seconds: float) -> waiting.WaitingView | None:
        """Return what a person is told at the end of some seconds."""
        view = None
        for _ in range(int(seconds * 20)):
            self.now += 0.05
            inside = set(self.places) - self.left
            view = self.watch.look(self.now, inside=inside, left=self.left)
            if self.page.question > self.questions:
                self.questions = self.page.question
                for rank in inside - self.silent:
                    report = WhereReport(rank=rank, number=self.questions, where=self.places[rank])
                    self.watch.take(report, self.now)
        return view


@pytest.mark.parametrize("places", [{0: COMPUTES, 1: COMPUTES}, {0: READS, 1: READS}])
def test_nothing_is_said_of_ranks_that_work_for_minutes(places: dict[int, Whereabouts]) -> None:
    assert Ranks(places).after(200) is None


def test_ranks_that_move_are_never_asked() -> None:
    ranks = Ranks({0: WAITS, 1: WAITS})
    for _ in range(20):
        ranks.after(1.0)
        ranks.watch.moved(ranks.now)
    assert ranks.questions == 0


def test_a_rank_that_waits_is_told_until_it_moves() -> None:
    ranks = Ranks({0: COMPUTES, 1: WAITS})
    view = ranks.after(4)
    assert view is not None
    assert dict(view.places) == {0: COMPUTES, 1: WAITS}
    assert ranks.questions <= 3
    ranks.places[1] = COMPUTES
    assert ranks.after(1.5) is None


def test_a_short_wait_is_not_told() -> None:
    short = Whereabouts(doing="calls barrier", missing=(0,), seconds=3.0)
    assert Ranks({0: COMPUTES, 1: short}).after(60) is None


@pytest.fixture
def still() -> Iterator[int]:
    """A process that stands still."""
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process.pid
    process.kill()
    process.wait()


def test_a_rank_that_does_not_answer_is_looked_up(still: int) -> None:
    ranks = Ranks({0: COMPUTES, 1: WAITS}, process=still)
    ranks.silent = {0}
    assert ranks.after(3.5) is None, "it has still time to answer"
    view = ranks.after(3)
    assert view is not None
    assert view.places[0] is not None
    assert view.places[0].doing == SILENT[0]


def test_a_silent_rank_is_told_once_others_have_left(still: int) -> None:
    ranks = Ranks({0: COMPUTES, 1: COMPUTES}, process=still)
    ranks.silent = {0, 1}
    assert ranks.after(20) is None, "all may be in C code that takes its time"
    ranks.left = {1}
    assert ranks.after(4.5) is None
    view = ranks.after(3)
    assert view is not None
    assert view.places[0] is not None
    assert view.places[0].doing == SILENT[0]


def test_what_ranks_said_at_different_moments_is_not_put_together() -> None:
    ranks = Ranks({0: COMPUTES, 1: WAITS})
    shown = ranks.after(6)
    assert shown is not None
    late = WhereReport(rank=1, number=ranks.questions - 1, where=COMPUTES)
    ranks.watch.take(late, ranks.now)
    now = ranks.now + 0.01
    assert ranks.watch.look(now, inside={0, 1}, left=set()) is shown


def test_an_answer_from_before_a_rank_left_is_too_old() -> None:
    ranks = Ranks({0: COMPUTES, 1: WAITS})
    ranks.after(6)
    ranks.watch.look(ranks.now + 0.01, inside={1}, left={0})
    ranks.watch.take(WhereReport(rank=1, number=ranks.questions, where=WAITS), ranks.now)
    assert ranks.watch.look(ranks.now + 0.02, inside={1}, left={0}) is None


def test_only_a_wait_of_all_is_hopeless() -> None:
    ranks = Ranks({0: COMPUTES, 1: WAITS, 2: WAITS})
    assert not ranks.watch.hopeless(ranks.after(10)), "rank 0 may still come"
    ranks.left = {0}
    assert not ranks.watch.hopeless(ranks.after(0.1)), "what they said before it left is old"
    assert ranks.watch.hopeless(ranks.after(3))
    ranks.places[2] = COMPUTES
    assert not ranks.watch.hopeless(ranks.after(3)), "rank 2 may set rank 1 free"
    ranks.places[2] = Whereabouts(doing="calls recv", missing=(0,), is_message=True, seconds=9.0)
    assert not ranks.watch.hopeless(ranks.after(3)), "it may be on its way"
    ranks.places[2] = Whereabouts(doing="calls barrier", missing=(0,), seconds=1.0)
    assert not ranks.watch.hopeless(ranks.after(3)), "it has waited for a moment only"


def test_each_waiting_for_the_other_is_hopeless() -> None:
    other = Whereabouts(doing="is at the start of a step", missing=(1,), seconds=6.0)
    ranks = Ranks({0: other, 1: WAITS})
    view = ranks.after(10)
    assert view is not None
    assert ranks.watch.hopeless(view)
    assert waiting.hopeless(view).startswith(
        "rank 0 is at the start of a step, rank 1 gathers `model` (line 5 of the cell: model(x)): "
        "they wait for each other, and none can go on;\nevery rank must run"
    )


def test_a_rank_that_computes_after_others_have_left_is_left_alone() -> None:
    ranks = Ranks({0: COMPUTES, 1: COMPUTES})
    ranks.left = {1}
    assert ranks.after(100) is None


# ---------------------------------------------------------------- the table


def test_a_training_panel_shows_the_table_beneath_and_who_waits_in_its_first_line() -> None:
    table = waiting.WaitingView(places={0: COMPUTES, 1: WAITS}, hint="a hint")
    html, text = training.html(view(waiting=table)), training.text(view(waiting=table))
    assert text.splitlines()[0].endswith("rank 1 waits for rank 0")
    assert waiting.text(table) in text
    assert waiting.html(table) in html
    assert training.html(view()) + waiting.html(table) != html, "it stands in the card"
    assert len(waiting.html(table)) < 3_000


def test_ranks_in_the_same_place_stand_in_one_row() -> None:
    places = {
        rank: Whereabouts(doing="calls barrier", missing=(0,), seconds=rank) for rank in range(64)
    }
    view = waiting.WaitingView(places=places | {0: COMPUTES, 63: None}, hint="a hint")
    assert waiting.text(view).splitlines() == [
        "rank  what it does                     line of the cell  since",
        "0     computes                         3: y = slow(x)",
        "1-62  calls barrier, waits for rank 0                    01:02",
        "63    has left the cell",
        "a hint",
    ]


def test_several_ranks_are_told_in_the_plural() -> None:
    waits = Whereabouts(doing="calls barrier", missing=(2, 3), seconds=7.0)
    view = waiting.WaitingView(places={0: waits, 1: waits, 2: None, 3: None})
    assert waiting.summary(view) == "ranks 0-1 wait for ranks 2-3"
    assert [" ".join(line.split()) for line in waiting.text(view).splitlines()[1:]] == [
        "0-1 calls barrier, waits for ranks 2-3 00:07",
        "2-3 have left the cell",
    ]
    told, advice = waiting.hopeless(view).splitlines()
    assert told.endswith(", and ranks 2-3 have left the cell and will never come;")
    assert advice.startswith("what needs every rank")


def test_the_room_of_a_table_stays_until_the_run_ends() -> None:
    table = waiting.WaitingView(places={0: COMPUTES, 1: WAITS}, hint="a hint")
    over = training.html(view(waited=table))
    assert waiting.html(table, is_over=True) in over
    assert "a hint" not in over
    assert "waits for rank 0" not in training.text(view(waited=table))
    assert "waits for rank 0" not in training.html(view("done", waited=table))


def test_a_run_that_was_asked_to_stop_says_so_until_it_has() -> None:
    words = "stopping after this step; press again to stop at once"
    assert words in training.html(view(is_stopping=True))
    assert words in training.text(view(is_stopping=True))
    assert words not in training.html(view("stopped", is_stopping=True))


def test_many_different_places_are_cut_short() -> None:
    view = waiting.WaitingView(places={n: Whereabouts(line=n, source="x") for n in range(64)})
    assert len(waiting.text(view).splitlines()) == 10
    assert "56 more" in waiting.text(view)


def test_what_a_person_typed_is_escaped() -> None:
    where = Whereabouts(line=1, source="<b>&\x1b[31m", doing="gathers `<i>`", inner="<u>.py:3")
    view = waiting.WaitingView(places={0: where}, hint="<hint>")
    assert not {"<b>", "<i>", "<u>", "<hint>"} & set(waiting.html(view).split())
    for tag in ("<b>", "<i>", "<u>", "<hint>"):
        assert tag not in waiting.html(view)
    assert "\x1b" not in waiting.text(view)


def test_ranks_that_diverged_are_told_with_both_lines_where_they_are_known() -> None:
    first = Whereabouts(line=3, source="x = model.a(x)", doing="gathers `model.a`")
    second = Whereabouts(line=5, source="x = model.b(x)", doing="gathers `model.b`", missing=(0,))
    saw = Failure(kind="diverged", exception_type="", message="", where=second)
    let_go = Failure(kind="released", exception_type="", message="", where=first)
    assert waiting.diverged({0: let_go, 1: saw}).startswith(
        "the ranks diverged: rank 0 gathers `model.a` (line 3 of the cell: x = model.a(x)), "
        "rank 1 gathers `model.b` (line 5 of the cell: x = model.b(x));\nevery rank must"
    )
    assert "rank 0 does something else, rank 1 gathers" in waiting.diverged({1: saw})
    assert waiting.diverged({0: let_go}) == ""
    behind = Whereabouts(source="backward", doing="gathers `model.b`")
    let_go = Failure(kind="released", exception_type="", message="", where=behind)
    assert waiting.diverged({0: let_go, 1: saw}).splitlines()[1] == (
        "rank 0 is in its backward already, so rank 1 has run more of a forward, in that line or "
        "above it;"
    )
