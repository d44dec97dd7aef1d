"""What ranks print as one text: labelled, equal lines merged, on time, in order."""

import random
from typing import Any

import pytest

from fsdp_magic.core.cell_output import PrintedReport
from fsdp_magic.notebook.output import Output

TWIN_SECONDS = 0.2
PARTIAL_SECONDS = 0.5


class Screen:
    """Takes what is written."""

    def __init__(self, ranks: int) -> None:
        self.lines: list[str] = []
        self.frames: list[list[str]] = []
        self.notes: list[str] = []
        self.streams: list[str] = []
        self.output = Output(range(ranks), screen=self)

    is_rich = False

    def flush(self) -> None:
        pass

    def progress(self, lines: Any, notes: Any, *, final: bool) -> None:
        self.frames.append([line.labelled for line in lines])
        self.notes = list(notes)

    def display(self, bundle: Any, metadata: Any) -> Any:
        raise AssertionError

    def add(self, rank: int, stream: str, text: str, *, now: float) -> None:
        self.output.add(rank, stream, PrintedReport(parts=(text,)), now=now)

    def write(self, stream: str, text: str) -> None:
        self.streams.append(stream)
        self.lines.append(text)


def test_equal_lines_of_all_ranks_are_written_once_and_at_once() -> None:
    screen = Screen(4)
    for rank in range(4):
        screen.add(rank, "stdout", "hello\n", now=0.0)
    screen.output.show(now=0.0)
    assert screen.lines == ["[ranks 0-3] hello\n"]


def test_a_line_waits_for_its_twins_no_longer_than_they_may_take() -> None:
    screen = Screen(2)
    screen.add(0, "stdout", "one\n", now=0.0)
    screen.output.show(now=TWIN_SECONDS - 0.01)
    assert screen.lines == []
    screen.output.show(now=TWIN_SECONDS)
    assert screen.lines == ["[rank 0] one\n"]


def test_a_twin_that_comes_in_time_is_merged() -> None:
    screen = Screen(2)
    screen.add(0, "stdout", "one\n", now=0.0)
    screen.add(1, "stdout", "one\n", now=TWIN_SECONDS - 0.01)
    screen.output.show(now=TWIN_SECONDS - 0.01)
    assert screen.lines == ["[ranks 0-1] one\n"]


def test_some_twins_are_merged_when_the_time_is_up() -> None:
    screen = Screen(3)
    for rank in (0, 2):
        screen.add(rank, "stdout", "x\n", now=0.0)
    screen.output.show(now=TWIN_SECONDS)
    assert screen.lines == ["[ranks 0,2] x\n"]


def test_a_partial_line_is_flushed_after_half_a_second() -> None:
    screen = Screen(1)
    screen.add(0, "stdout", "50 %", now=0.0)
    screen.output.show(now=PARTIAL_SECONDS - 0.01)
    assert screen.lines == []
    screen.output.show(now=PARTIAL_SECONDS)
    assert screen.lines == ["[rank 0] 50 %\n"]


def test_a_line_that_keeps_growing_is_flushed_all_the_same() -> None:
    screen = Screen(1)
    for tenth in range(6):
        screen.add(0, "stdout", ".", now=tenth / 10)
        screen.output.show(now=tenth / 10)
    assert screen.lines == ["[rank 0] ......\n"]


def test_parts_of_a_line_are_joined() -> None:
    screen = Screen(1)
    screen.add(0, "stdout", "a", now=0.0)
    screen.add(0, "stdout", "b\nc", now=0.1)
    screen.output.finish()
    assert screen.lines == ["[rank 0] ab\n", "[rank 0] c\n"]


def test_the_two_streams_are_no_twins_and_are_kept_apart() -> None:
    screen = Screen(2)
    screen.add(0, "stdout", "x\n", now=0.0)
    screen.add(1, "stderr", "x\n", now=0.0)
    screen.output.show(now=TWIN_SECONDS)
    assert sorted(zip(screen.streams, screen.lines)) == [
        ("stderr", "[rank 1] x\n"),
        ("stdout", "[rank 0] x\n"),
    ]


def test_a_partial_line_ends_where_the_other_stream_begins() -> None:
    screen = Screen(1)
    screen.add(0, "stdout", "before", now=0.0)
    screen.add(0, "stderr", "warning\n", now=0.0)
    screen.output.finish()
    assert screen.lines == ["[rank 0] before\n", "[rank 0] warning\n"]
    assert screen.streams == ["stdout", "stderr"]


def test_a_late_twin_does_not_overtake_its_own_rank() -> None:
    screen = Screen(2)
    screen.add(0, "stdout", "a\nb\n", now=0.0)
    screen.add(1, "stdout", "b\na\n", now=0.0)
    screen.output.finish()
    own = {rank: [x for x in screen.lines if f"{rank}]" in x or "0-1" in x] for rank in (0, 1)}
    assert [x[-2] for x in own[0]] == ["a", "b"]
    assert [x[-2] for x in own[1]] == ["b", "a"]


def test_ranks_that_print_their_own_line_and_then_the_same_meet_again() -> None:
    screen = Screen(2)
    screen.add(0, "stdout", "mine 0\nsame\n", now=0.0)
    screen.add(1, "stdout", "mine 1\nsame\n", now=0.1)
    screen.output.show(now=TWIN_SECONDS + 0.2)
    assert screen.lines == ["[rank 0] mine 0\n", "[rank 1] mine 1\n", "[ranks 0-1] same\n"]


def test_lines_of_one_moment_stand_in_the_order_of_ranks() -> None:
    screen = Screen(3)
    for rank, moment in ((2, 0.0), (1, 0.02), (0, 0.04)):
        screen.add(rank, "stdout", f"I am {rank}\n", now=moment)
    screen.output.show(now=0.04 + TWIN_SECONDS)
    assert screen.lines == [f"[rank {rank}] I am {rank}\n" for rank in range(3)]


@pytest.mark.parametrize("seed", range(20))
def test_every_ranks_lines_keep_their_order_and_none_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(1, 4)
    screen, printed = Screen(ranks), {rank: [] for rank in range(ranks)}
    now = 0.0
    for _ in range(200):
        now += chance.random() * 0.1
        rank, line = chance.randrange(ranks), chance.choice("abc")
        printed[rank].append(line)
        screen.add(rank, "stdout", f"{line}\n", now=now)
        screen.output.show(now=now)
    screen.output.finish()
    shown = {rank: [] for rank in range(ranks)}
    for text in screen.lines:
        label, _, line = text.rstrip("\n").partition("] ")
        for rank in _ranks(label):
            shown[rank].append(line)
    assert shown == printed


def _ranks(label: str) -> list[int]:
    """Read a label back: ``[ranks 0-2`` and the like."""
    found: list[int] = []
    for part in label.split(" ")[1].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_everything_printed_is_also_kept_by_rank_and_stream() -> None:
    screen = Screen(2)
    screen.add(1, "stdout", "a\nb", now=0.0)
    screen.add(1, "stderr", "c", now=0.0)
    assert screen.output.collected(1, "stdout") == "a\nb"
    assert screen.output.collected(1, "stderr") == "c"
    assert screen.output.collected(0, "stdout") == ""


# ---------------------------------------------------------------- progress bars


def bar(name: str, done: int, *, total: int = 10, rate: float = 5.0) -> str:
    percent = 100 * done // total
    return f"{name}: {percent:3d}%|███   | {done}/{total} [00:01<00:03, {rate}it/s]"


def progress(screen: Screen, rank: int, *texts: str) -> None:
    report = PrintedReport(bars=tuple(enumerate(texts)))
    screen.output.add(rank, "stderr", report, now=0.0)


def test_bars_of_ranks_that_differ_in_their_times_only_are_one_line() -> None:
    screen = Screen(3)
    for rank in range(3):
        progress(screen, rank, bar("train", 4, rate=5.0 + rank))
    screen.output.show(now=0.0)
    assert screen.frames == [[f"[ranks 0-2] {bar('train', 4)}"]]


def test_the_line_of_several_ranks_is_that_of_the_last_one() -> None:
    screen = Screen(2)
    progress(screen, 0, bar("train", 7))
    progress(screen, 1, bar("train", 4))
    screen.output.show(now=0.0)
    assert screen.frames == [[f"[ranks 0-1] {bar('train', 4)}  rank 0: 7"]]


def test_different_bars_are_lines_of_their_own() -> None:
    screen = Screen(2)
    progress(screen, 0, bar("mine", 4))
    progress(screen, 1, bar("other", 4))
    screen.output.show(now=0.0)
    assert screen.frames == [[f"[rank 0] {bar('mine', 4)}", f"[rank 1] {bar('other', 4)}"]]


def test_rewritten_texts_that_differed_once_stay_apart_so_that_nothing_jumps() -> None:
    screen, heights = Screen(2), []
    for step in range(10):
        now = float(step)
        for rank in range(2):
            text = f"loss {step % (rank + 2)}"  # alike again at the sixth
            report = PrintedReport(bars=((0, text),))
            screen.output.add(rank, "stdout", report, now=now)
        screen.output.show(now=now)
        heights.append(len(screen.frames[-1]))
    assert heights == [1, 1] + [2] * 8


def test_the_live_place_is_drawn_four_times_a_second_at_most_and_ends_with_the_last_state() -> None:
    screen = Screen(1)
    for step in range(1000):
        progress(screen, 0, bar("train", step, total=1000))
        screen.output.show(now=step / 1000)
    assert len(screen.frames) <= 4
    screen.output.finish()
    assert screen.frames[-1] == [f"[rank 0] {bar('train', 999, total=1000)}"]
    assert screen.lines == []


def test_bars_that_are_not_told_of_again_keep_their_last_state() -> None:
    screen = Screen(1)
    screen.output.add(0, "stderr", PrintedReport(bars=((0, "old"), (1, "a"))), now=0.0)
    screen.output.add(0, "stderr", PrintedReport(bars=((1, "b"),)), now=0.0)
    screen.output.finish()
    assert screen.frames[-1] == ["[rank 0] old", "[rank 0] b"]


def test_collected_text_is_what_a_terminal_would_have_kept() -> None:
    screen = Screen(1)
    for report in (
        PrintedReport(parts=("before\n", 0), bars=((0, "50 %"),)),
        PrintedReport(bars=((0, "90 %"),)),
        PrintedReport(parts=("after\nparti",), bars=((0, "done"),)),
        PrintedReport(parts=(1,), taken_back=5, bars=((0, "done"), (1, "rewritten"))),
    ):
        screen.output.add(0, "stderr", report, now=0.0)
    assert screen.output.collected(0, "stderr") == "before\ndone\nafter\nrewritten\n"
    screen.output.finish()
    assert screen.lines == ["[rank 0] before\n", "[rank 0] after\n"]


# ---------------------------------------------------------------- floods


def test_a_flood_is_shown_up_to_the_cap_then_counted_then_its_end() -> None:
    screen = Screen(2)
    for rank in (0, 1):
        for i in range(0, 9000, 100):
            text = "".join(f"{rank}:{j}\n" for j in range(i, i + 100))
            screen.add(rank, "stdout", text, now=0.0)
    screen.output.show(now=10.0)
    screen.output.finish()
    shown = [line for line in screen.lines if line.startswith("[rank")]
    assert len(shown) == 2500 + 20
    assert shown[-1] == "[rank 1] 1:8999\n"
    assert screen.notes == ["… 15,480 more lines"]


def test_the_cap_holds_for_characters_too() -> None:
    screen = Screen(1)
    for _ in range(100):
        screen.add(0, "stdout", "x" * 9_999 + "\n", now=0.0)
    screen.output.finish()
    assert 200_000 < sum(map(len, screen.lines)) < 320_000


def test_what_an_engine_left_out_is_counted_and_its_log_named() -> None:
    screen = Screen(2)
    for rank in (0, 1):
        log = f"/place/fsdp-1-rank{rank}.txt"
        report = PrintedReport(parts=("first\n",), left_out=1000, log=log)
        screen.output.add(rank, "stdout", report, now=0.0)
        report = PrintedReport(left_out=999, log=log, tail="last\n")
        screen.output.add(rank, "stdout", report, now=0.0)
    screen.output.finish()
    assert screen.lines[0] == "[ranks 0-1] first\n"
    assert screen.lines[-1] == "[ranks 0-1] last\n"
    (note,) = screen.notes
    assert note.startswith("… 1,998 more lines")
    assert note.endswith("/place/fsdp-1-rank*.txt")
    expected = "first\n… 999 more lines; all of it is in /place/fsdp-1-rank1.txt\nlast\n"
    assert screen.output.collected(1, "stdout") == expected


def test_past_the_cap_nothing_is_kept_or_compared() -> None:
    screen = Screen(2)
    screen.add(0, "stdout", "x\n" * 2500, now=0.0)
    screen.output.show(now=1.0)
    screen.add(0, "stdout", "y\n" * 100_000, now=1.0)
    assert not any(screen.output._whole.values())
