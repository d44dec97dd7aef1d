"""What a terminal would make of a stream: ordinary text passes, rewritten lines become bars."""

from __future__ import annotations

import io
import random
import re
from typing import Any

import pytest
from tqdm import tqdm

from fsdp_magic.engine.terminal_lines import TerminalLines


class Reader:
    """Takes what comes out, as the notebook's side does."""

    def __init__(self) -> None:
        self.lines = TerminalLines()
        self.text = ""
        self.bars: dict[int, str] = {}

    def feed(self, *texts: str) -> Reader:
        for text in texts:
            change = self.lines.feed(text)
            self.text = self.text[: len(self.text) - change.taken_back]
            self.text += "".join(part for part in change.parts if isinstance(part, str))
            self.bars.update(self.lines.changed_bars() or ())
        return self

    @property
    def shown(self) -> list[str]:
        return [text for text in self.bars.values() if text]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a\nb\n",
        "a\r\nb",
        "\n\n\n",
        "\x1b[31mred\x1b[0m\n",
        "tab\there",
        "x" * 10_000 + "\n",
    ],
)
def test_ordinary_text_passes_as_it_is(text: str) -> None:
    reader = Reader().feed(text)
    assert reader.text == text.replace("\r\n", "\n")
    assert reader.bars == {}


def test_a_line_that_is_begun_anew_is_one_line_with_its_newest_text() -> None:
    reader = Reader().feed("50%\r", "60%\r", "100%", "\nafter\n")
    assert (reader.text, reader.shown) == ("after\n", ["100%"])


def test_what_was_passed_of_a_line_before_it_was_rewritten_is_taken_back() -> None:
    reader = Reader().feed("before\n50%")
    assert reader.text == "before\n50%"
    assert (reader.feed("\r60%").text, reader.shown) == ("before\n", ["60%"])


def test_a_shorter_text_leaves_the_end_of_a_longer_one_as_a_terminal_does() -> None:
    assert Reader().feed("abcdef\rxy").shown == ["xycdef"]
    assert Reader().feed("abcdef\rxy\x1b[K").shown == ["xy"]
    assert Reader().feed("abc\b\bX").shown == ["aXc"]


def test_a_bar_that_is_done_keeps_its_last_state_and_is_no_ordinary_text() -> None:
    stream = io.StringIO()
    for _ in tqdm(range(3), file=stream, desc="one", mininterval=0):
        pass
    reader = Reader().feed(*stream.getvalue(), "plain\n")
    assert reader.text == "plain\n"
    assert len(reader.shown) == 1
    assert reader.shown[0].startswith("one: 100%")


def test_nested_bars_are_two_lines_whatever_they_redraw() -> None:
    stream, reader, most = io.StringIO(), Reader(), 0
    for _ in tqdm(range(5), file=stream, desc="outer", mininterval=0):
        for _ in tqdm(range(5), file=stream, desc="inner", mininterval=0, leave=False):
            reader.feed(stream.getvalue())
            stream.seek(0)
            stream.truncate()
            most = max(most, len(reader.shown))
    reader.feed(stream.getvalue())
    assert most == 2
    assert [text[:11] for text in reader.shown] == ["outer: 100%"]
    assert reader.text == ""


class Instances(list[Any]):
    """Bars in an order that is known; tqdm keeps a set of them, whose order is chance."""

    def __init__(self, at: int | None) -> None:
        self.add = self.append if at is None else lambda bar: self.insert(at, bar)


@pytest.mark.parametrize("at", [0, None], ids=["newest first", "oldest first"])
def test_lines_written_between_bars_are_ordinary_text(at: int | None) -> None:
    class Bar(tqdm):  # type: ignore[type-arg]
        _instances = Instances(at)

    stream = io.StringIO()
    for i in Bar(range(3), file=stream, desc="outer", mininterval=0):
        for _ in Bar(range(2), file=stream, desc="inner", mininterval=0, leave=False):
            Bar.write(f"message {i}", file=stream)
    reader = Reader().feed(stream.getvalue())
    assert reader.text == "".join(f"message {i}\n" * 2 for i in range(3))
    assert [text[:11] for text in reader.shown] == ["outer: 100%"]


def test_what_follows_a_clearing_replaces_what_came_since_the_last() -> None:
    reader = Reader().feed("before\n")
    for epoch in range(100):
        reader.lines.clear(wait=True)
        reader.feed(f"epoch {epoch}\n", "more\n")
    assert (reader.text, reader.shown) == ("before\n", ["epoch 99", "more"])
    reader.lines.clear(wait=False)
    assert reader.feed("").shown == []


def test_more_lines_than_can_be_gone_back_to_are_ordinary_again() -> None:
    reader = Reader()
    reader.lines.clear(wait=True)
    reader.feed("".join(f"{i}\n" for i in range(300)))
    assert reader.text.endswith("298\n299\n")
    assert len(reader.bars) < 100


def test_a_million_redraws_and_bars_leave_little_behind() -> None:
    lines = TerminalLines()
    for i in range(2000):
        lines.feed(f"bar {i}\r" * 20 + f"bar {i} done\n")
    told = lines.changed_bars()
    assert told is not None
    assert told[-1][1] == "bar 1999 done"
    assert len(told) <= 200
    lines.feed("x\ry")
    assert len(lines.changed_bars() or ()) <= 21, "those that were told are forgotten"


def redraws() -> str:
    """Return what nested bars, messages between them and ordinary lines write."""
    stream = io.StringIO()
    stream.write("before\n")
    for i in tqdm(range(3), file=stream, desc="outer", mininterval=0):
        for _ in tqdm(range(3), file=stream, desc="inner", mininterval=0, leave=i == 1):
            tqdm.write(f"message {i}", file=stream)
    stream.write("between\n1 %\r2 %\r3 %\nafter\n")
    for _ in tqdm(range(3), file=stream, desc="last", mininterval=0):
        pass
    return stream.getvalue()


@pytest.mark.parametrize("seed", range(30))
def test_how_a_text_is_cut_into_pieces_does_not_matter(seed: int) -> None:
    chance, text = random.Random(seed), redraws()
    whole, cut, at = Reader().feed(text), Reader(), 0
    writes = re.findall(r"\x1b\[A|.", text, re.DOTALL)  # a sequence is written at once
    while at < len(writes):
        end = at + chance.randint(1, 40)
        cut.feed("".join(writes[at:end]))
        at = end
    assert cut.text == whole.text
    assert sorted(_without_times(cut.shown)) == sorted(_without_times(whole.shown))


def _without_times(texts: list[str]) -> list[str]:
    return [text.partition(" [")[0] for text in texts]


@pytest.mark.parametrize("seed", range(30))
def test_nothing_that_is_printed_can_break_it(seed: int) -> None:
    chance, lines = random.Random(seed), TerminalLines()
    pieces = [
        "a",
        "bc",
        "\n",
        "\r",
        "\r\n",
        "\b",
        "\x1b",
        "[",
        "\x1b[3A",
        "\x1b[K",
        "\x1b[5C",
        "\x1b[B",
        "    ",
    ]
    for _ in range(300):
        lines.feed("".join(chance.choice(pieces) for _ in range(chance.randint(0, 9))))
        if chance.random() < 0.05:
            lines.clear(wait=chance.random() < 0.5)
    assert len(lines.changed_bars() or ()) <= 200


@pytest.mark.parametrize("move", ["\x1b[99999999G", "\x1b[99999999C" * 3, f"\x1b[{'9' * 5000}G"])
def test_a_far_column_does_not_make_a_long_line(move: str) -> None:
    lines = TerminalLines()
    lines.feed(f"a{move}")
    assert lines._x <= 10_000  # a line is padded up to here
    lines.feed("x\r")
    assert sum(len(row.text) for row in lines._rows) <= 20_000
    lines.feed("b" * 100_000 + move + "c")
    assert sum(len(row.text) for row in lines._rows) <= 20_000
