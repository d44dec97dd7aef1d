"""What a cell may send and what goes to its log; what a notebook can show of a display."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_magic.core.cell_output import CHARACTERS, LINES, shortened
from fsdp_magic.engine import printing
from fsdp_magic.engine.bundles import allowed
from fsdp_magic.engine.printing import Call
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.screen import Nowhere


class Page(Nowhere):
    """Keeps the lines that are written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, stream: str, text: str) -> None:
        self.lines.append(text)


def sent_and_log(tmp_path: Path, texts: list[str]) -> tuple[str, str, str, int]:
    """Print texts; return what was sent, the log, the end, and how many lines were left out."""
    log = tmp_path / "output" / "log.txt"
    call = Call({}, log)
    reports = [call.take("stdout", text) for text in texts]
    sent = "".join(part for report in reports for part in report.parts if isinstance(part, str))
    last = [report for _, report in call.finish()]
    tail, left_out = (last[0].tail, last[0].left_out) if last else ("", 0)
    return sent, log.read_text() if log.exists() else "", tail, left_out


def test_a_cell_below_the_cap_writes_no_log(tmp_path: Path) -> None:
    assert sent_and_log(tmp_path, ["a\n"] * LINES) == ("a\n" * LINES, "", "", 0)


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
def test_the_log_of_a_flood_has_all_of_it(tmp_path: Path, size: int) -> None:
    text = "".join(f"line {i}\n" for i in range(10_000))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    sent, log, tail, left_out = sent_and_log(tmp_path, pieces)
    assert log == text
    assert text.startswith(sent)
    assert sent.count("\n") == LINES
    assert tail == "".join(f"line {i}\n" for i in range(9990, 10_000))
    assert left_out == 10_000 - LINES - 10
    assert (tmp_path / "output").stat().st_mode & 0o777 == 0o700


def test_long_lines_count_too(tmp_path: Path) -> None:
    sent, log, _, _ = sent_and_log(tmp_path, ["x" * 150_000 + "\n"] * 3)
    assert len(sent) == CHARACTERS
    assert len(log) == 3 * 150_001


def test_a_cell_that_ends_in_the_middle_of_a_line_shows_it(tmp_path: Path) -> None:
    _, _, tail, _ = sent_and_log(tmp_path, ["a\n" * (LINES + 100), "the end"])
    assert tail.endswith("a\nthe end")


def test_redraws_of_a_bar_are_no_flood(tmp_path: Path) -> None:
    call = Call({}, tmp_path / "log.txt")
    for i in range(20_000):
        report = call.take("stderr", f"\r{i} of 20000")
    assert (report.bars, report.left_out) == (((0, "19999 of 20000"),), 0)


def test_a_full_disk_does_not_fail_the_cell() -> None:
    call = Call({}, Path("/proc/nothing/can/be/here.txt"))
    assert call.take("stdout", "x\n" * 10_000).left_out > 0


def test_what_a_notebook_cannot_show_is_a_line_that_says_what_to_do() -> None:
    assert allowed({"text/html": "<b>"}) == {"text/html": "<b>"}
    large = allowed({"image/png": "x" * 6_000_000, "text/plain": "a figure"})
    assert set(large) == {"text/plain"}
    assert "6.0 MB (image/png)" in large["text/plain"]
    widget = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "HBox()"}
    assert "a widget cannot work on an engine" in allowed(widget)["text/plain"]


def test_the_oldest_logs_make_room_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "_LOGS_BYTES", 100)
    shelf, paths = printing.Printing(), [tmp_path / f"{number}.txt" for number in range(4)]
    for path in paths:
        path.write_text("x" * 40)
        shelf._make_room((path, 40))
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_of_a_line_beyond_the_cap_the_real_end_is_shown_once(tmp_path: Path) -> None:
    log = tmp_path / "output" / "log.txt"
    call, page = Call({}, log), Page()
    output = Output([0], screen=page)
    reports = [call.take("stdout", "y" * 250_000 + "\n"), call.take("stdout", "THE END\n")]
    for report in (*reports, *(report for _, report in call.finish())):
        output.add(0, "stdout", report, now=0.0)
    output.finish()
    assert sum(map(len, page.lines)) < 201_000
    assert page.lines[-1] == "[rank 0] THE END\n"
    assert page.lines[-2] == f"[rank 0] …{'y' * 399}\n"
    end = f"y\n… more; all of it is in {log}\n…{'y' * 399}\nTHE END\n"
    assert output.collected(0, "stdout").endswith(end)


def test_a_result_is_shown_to_the_length_of_a_flood() -> None:
    assert shortened("x" * CHARACTERS) == "x" * CHARACTERS
    assert shortened("a\n" * (LINES - 1)) == "a\n" * (LINES - 1)
    long = shortened("z" * 1_000_000 + "\nend")
    assert len(long) < 202_000
    assert long.startswith("z" * CHARACTERS)
    assert "more characters; bind it to a name" in long
    assert long.endswith(f"\n…{'z' * 399}\nend")
    many = shortened("".join(f"{i}\n" for i in range(100_000)))
    assert many.count("\n") < LINES + 15
    assert many.endswith("\n99998\n99999\n")
