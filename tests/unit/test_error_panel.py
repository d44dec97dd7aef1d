"""What a person reads of a cell that failed."""

from __future__ import annotations

from typing import Any

import pytest
from panel_records import failure

from fsdp_magic.panels import errors


def test_equal_tracebacks_are_shown_once_with_their_ranks() -> None:
    other = failure(exception_type="KeyError", message="'labels'", traceback="")
    exceptions = {3: failure(), 0: failure(), 1: failure(), 2: failure(), 5: other}
    text = errors.text(exceptions, released=(4, 6, 7))
    assert text.startswith("ranks 0-3 raised ValueError\nFile cell 4, line 3\n")
    assert text.count("File cell 4") == 1
    assert "ValueError: target size (8)\nstep 7 was rolled back\n" in text
    assert "rank 5 raised KeyError\nKeyError: 'labels'" in text
    assert text.endswith("ranks 4,6-7 released, because a peer failed")


def test_ranks_that_failed_at_the_same_place_stand_together_with_their_messages() -> None:
    exceptions = {rank: failure(message=f"row {rank // 2}") for rank in range(4)}
    assert errors.text(exceptions) == (
        "ranks 0-3 raised ValueError\n"
        'File cell 4, line 3\n----> 3 loss = f(out, batch["labels"])\n'
        "ranks 0-1: ValueError: row 0\n"
        "ranks 2-3: ValueError: row 1\n"
        "step 7 was rolled back"
    )


def test_64_ranks_that_fail_in_64_ways_fit_a_screen() -> None:
    messages = {rank: failure(message=f"row {rank}") for rank in range(64)}
    assert len(errors.text(messages).splitlines()) == 13
    assert "… 56 more messages; error.exceptions holds them by rank" in errors.text(messages)
    places = {rank: failure(traceback=f"line {rank}") for rank in range(64)}
    text = errors.text(places, released=(64,))
    assert len(text.splitlines()) <= 24
    assert "ranks 4-63 failed in other ways; error.exceptions holds them by rank" in text
    assert text.endswith("rank 64 released, because a peer failed")


def test_what_ipython_shows_is_the_text_with_headings_that_stand_out() -> None:
    exceptions = {0: failure(), 1: failure(exception_type="KeyError")}
    shown = "\n".join(errors.coloured(exceptions, released=(2,)))
    assert "\x1b[1mrank 0 raised ValueError\x1b[0m\n" in shown
    plain = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert plain == errors.text(exceptions, released=(2,))
    assert "\x1b" not in plain


def test_a_message_steers_no_terminal_although_headings_do() -> None:
    hostile = failure(
        exception_type="\x1b[31mE", message="\x1b]0;x\x07\u202ey", traceback="\x1b[2J"
    )
    shown = "\n".join(errors.coloured({0: hostile}))
    assert shown.startswith("\x1b[1mrank 0 raised E\x1b[0m\n")
    assert shown.count("\x1b") == 2
    assert "\u202e" not in shown


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("out_of_memory", "rank 1 out of memory"),
        ("interrupted", "rank 1 interrupted"),
        ("usage", "rank 1 refused the cell before it ran"),
    ],
)
def test_each_kind_of_failure_has_its_words(kind: Any, expected: str) -> None:
    assert errors.text({1: failure(kind=kind)}).startswith(expected)


def test_a_failure_without_message_ends_in_its_type() -> None:
    text = errors.text({0: failure(message="", traceback="", notes=())})
    assert text == "rank 0 raised ValueError\nValueError"
