"""The block at the end of a terminal, seen through a terminal small enough to be understood."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import sys
from typing import Any

import pytest
from panel_records import unknown_ranks, view
from terminal import Terminal

from fsdp_magic.notebook import display
from fsdp_magic.notebook.terminal_block import TerminalBlock, cut, is_terminal, width
from fsdp_magic.panels import training


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 40 × 10."""
    screen = Terminal(columns=40, rows=10)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size(screen.size))
    monkeypatch.setenv("TERM", "xterm")
    return screen


def _stand_in(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    """Make it stdout and stderr; from within a test, because pytest sets its own before each."""
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)


def test_a_frame_takes_the_place_of_the_one_before(terminal: Terminal) -> None:
    terminal.write("before\n")
    block = TerminalBlock(terminal)
    for number in range(3):
        block.draw(f"step {number}\nloss\nbar", final=False)
    block.draw("done\nloss", final=True)
    terminal.write("after\n")
    assert terminal.all == ["before", "done", "loss", "after"]


def test_what_is_printed_meanwhile_stands_above_and_nothing_is_lost(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(monkeypatch, terminal)
    block = TerminalBlock(terminal)
    for number in range(8):
        block.draw(f"step {number}\nloss\nbar", final=False)
        print(f"printed {number}")
        print(f"warned {number}", file=sys.stderr)
    block.draw("done", final=True)
    printed = [f"{word} {number}" for number in range(8) for word in ("printed", "warned")]
    assert terminal.all == [*printed, "done"]
    assert sys.stdout is sys.stderr is terminal


def test_a_block_higher_and_wider_than_the_terminal_is_cut_until_the_last_frame(
    terminal: Terminal,
) -> None:
    block = TerminalBlock(terminal)
    tall = "\n".join(f"{number} {'x' * 60}" for number in range(30))
    for _ in range(3):
        block.draw(tall, final=False)
        assert len(terminal.all) == 9
        assert terminal.all[0] == f"0 {'x' * 36}…"
    block.draw(tall, final=True)
    assert len([line for line in terminal.all if re.match(r"\d+ x", line)]) == 30


def test_wide_characters_are_counted_as_the_terminal_counts_them(terminal: Terminal) -> None:
    block = TerminalBlock(terminal)
    for text in ("漢" * 30, "e\u0301" * 60, "漢字" + "a" * 50):
        block.draw(text, final=False)
        block.draw("short", final=False)
        assert terminal.all == ["short"]
    assert width("漢字e\u0301x") == 6
    assert cut("漢字漢字", 5) == "漢字…"
    assert cut("漢字漢字", 8) == "漢字漢字"


def test_a_terminal_that_became_narrower_is_cleared_whole(terminal: Terminal) -> None:
    block = TerminalBlock(terminal)
    block.draw("\n".join(["y" * 39] * 3), final=False)
    terminal.resize(20)
    block.draw("short", final=True)
    assert terminal.all == ["short"]


def test_a_run_in_a_terminal_is_one_block(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(monkeypatch, terminal)
    terminal.resize(100, 30)
    panel = display.Panel()
    for frame in (
        view("starting", ranks=unknown_ranks(2)),
        *(view(steps=steps) for steps in (1, 50, 99)),
    ):
        panel.draw("", training.text(frame), final=False)
    done = training.text(view("done", steps=100))
    panel.draw("", done, final=True)
    assert terminal.all == [line.rstrip() for line in done.splitlines()]


@pytest.mark.parametrize("configured", [True, False])
def test_a_script_without_a_terminal_gets_a_line_now_and_then_and_the_last_frame(
    configured: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter([0.0, 0.5, 9.9, 10.1, 11.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    if configured:
        caplog.set_level(logging.INFO, logger="fsdp_magic")
    else:
        monkeypatch.setattr(logging.getLogger("fsdp_magic"), "propagate", False)
    panel = display.Panel()
    for frame in ("a\n1", "b\n1", "c\n1", "d\n1"):
        panel.draw("", frame, final=False)
    panel.draw("", "e\n1", final=True)
    logged = "".join(f"{record.getMessage()}\n" for record in caplog.records)
    times = re.compile(r"^\d\d:\d\d:\d\d  ", re.MULTILINE)
    printed = capsys.readouterr().err
    assert len(times.findall(printed)) == (0 if configured else 2)
    assert (logged if configured else times.sub("", printed)) == "a\nd\ne\n1\n"


def test_what_is_no_terminal_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, screen = io.StringIO(), Terminal(columns=40, rows=10)
    closed.close()
    monkeypatch.setenv("TERM", "xterm")
    streams: list[Any] = [io.StringIO(), closed, None]
    assert not any(map(is_terminal, streams))
    assert is_terminal(screen)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(screen)
