"""The training panel: what each frame says, that nothing jumps, how large it gets."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from panel_records import (
    STATES,
    Page,
    assert_harmless,
    cpu_rank,
    gpu_rank,
    history,
    memory,
    numbers,
    unknown_ranks,
    view,
)

from fsdp_magic.core.units import GIB
from fsdp_magic.panels import training
from fsdp_magic.panels.loss_history import LossHistory
from fsdp_magic.panels.parts import BLOCKS, GREEN, ORANGE, RED


@pytest.mark.parametrize("state", STATES)
def test_a_frame_is_well_formed_and_harmless(state: str) -> None:
    for ranks in (1, 2, 8, 16, 64):
        assert_harmless(training.html(view(state, ranks)))
        assert training.text(view(state, ranks))


@pytest.mark.parametrize(
    ("state", "sign", "word"),
    [
        ("starting", "○", "Starting"),
        ("running", "●", "Running"),
        ("done", "✓", "Done"),
        ("stopped", "■", "Stopped"),
        ("failed", "✕", "Failed"),
    ],
)
def test_states_differ_in_sign_word_and_colour(state: Any, sign: str, word: str) -> None:
    shown = Page(training.html(view(state))).text
    assert shown.startswith(f"{sign} {word}")
    assert training.text(view(state)).startswith(f"{sign} {word}")
    assert len({colour for _, _, colour in training.STATES.values()}) == len(STATES)
    assert training.STATES["failed"][2] == RED
    assert training.STATES["stopped"][2] == ORANGE
    assert training.STATES["done"][2] == GREEN


def test_the_head_says_where_the_run_is() -> None:
    for shown in (Page(training.html(view())).text, training.text(view())):
        assert "8 × 4 × 2 ranks = 64 samples a step" in shown
        for words in (
            "Running 50 %",
            "step 50/100",
            "loss 2.510",
            "gradient norm 0.532",
            "tokens/s 65.5k",
            "ms/step 500",
            "elapsed 00:25",
            "ETA 01:15",
            "learning rate 3.00e-04",
            "capacity 80.0 GiB · 2 × NVIDIA H100",
            "14:03:22",
        ):
            assert words in shown


def test_the_first_line_tells_of_the_run_by_itself() -> None:
    first = training.text(view()).splitlines()[0]
    for words in ("Running 50 %", "step 50/100", "loss 2.510", "65.5k", "ETA 01:15"):
        assert words in first
    assert max(map(len, training.text(view()).splitlines())) < 100
    assert len(first) < 80


def test_a_run_that_is_over_has_its_lowest_loss_in_place_of_the_eta() -> None:
    over = view("done", losses=LossHistory([3.0, 1.5, 2.0]), steps=3)
    for shown in (Page(training.html(over)).text, training.text(over)):
        assert "lowest loss 1.500" in shown
        assert "ETA" not in shown


def test_a_later_run_counts_on() -> None:
    assert "step 250/300" in training.text(view(first_step=200))
    assert "step 250/300" in Page(training.html(view(first_step=200))).text


def test_samples_per_second_stand_in_where_there_are_no_tokens() -> None:
    shown = training.text(view(tokens_per_second=None))
    assert "samples/s 128" in shown
    assert "tokens/s" not in shown


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_parallel_size": 1, "samples_per_step": 32}, "8 × 4 × 1 rank = 32 samples a step"),
        ({"samples_per_step": None}, "8 × 4 × 2 ranks = 64 samples a step"),
        ({"samples_per_step": 60}, "8 × 4 × 2 ranks, 60 samples a step"),
        ({"micro_batch_size": None, "samples_per_step": None}, "2 ranks"),
        ({"micro_batch_size": None, "samples_per_step": 60}, "2 ranks, 60 samples a step"),
    ],
)
def test_the_batch_is_put_in_words(changes: dict[str, Any], expected: str) -> None:
    assert training.batch_text(view(**changes)) == expected


def test_unknown_numbers_read_na() -> None:
    unknown = view("starting", total_steps=None, ranks=unknown_ranks(2))
    for shown in (Page(training.html(unknown)).text, training.text(unknown)):
        for words in ("step 0/n/a", "loss n/a", "ms/step n/a", "ETA n/a", "learning rate n/a"):
            assert words in shown
        assert "None" not in shown
        assert "nan" not in shown
        assert "×  " not in shown
        assert "2 ranks" in shown
    rows = [line for line in training.text(unknown).splitlines() if line.startswith(("0 ", "1 "))]
    assert [line.split()[-2:] for line in rows] == [["n/a"] * 2] * 2


def test_a_capacity_is_said_once_unless_ranks_differ() -> None:
    same = training.text(view())
    assert "capacity 80.0 GiB" in same
    assert not re.search(r"^rank .*capacity", same, re.MULTILINE)
    small = replace(gpu_rank(1), memory=memory(4, capacity_bytes=60 * GIB))
    differ = training.text(view(ranks=(gpu_rank(0), small)))
    assert re.search(r"^rank .*capacity", differ, re.MULTILINE)
    assert "capacity 80.0 GiB" not in differ
    assert re.search(r"^1 .*\b60\.0\b", differ, re.MULTILINE)
    unknown = training.text(view(ranks=(cpu_rank(0), cpu_rank(1))))
    assert "capacity n/a" not in unknown


def test_ranks_on_different_devices_have_their_names() -> None:
    mixed = view(ranks=(gpu_rank(0, "NVIDIA H100"), gpu_rank(1, "NVIDIA A100")))
    for name in ("NVIDIA H100", "NVIDIA A100"):
        assert name in Page(training.html(mixed)).text
        assert name in training.text(mixed)


def test_columns_that_no_rank_knows_are_left_out() -> None:
    cpu = Page(training.html(view(ranks=(cpu_rank(0), cpu_rank(1))))).text
    assert not any(name in cpu for name in ("util", "°C", " W "))
    mixed = Page(training.html(view(ranks=(gpu_rank(0), cpu_rank(1))))).text
    assert "util °C W" in mixed
    assert mixed.count("93 %") == 1
    assert "n/a n/a n/a" in mixed


def test_the_last_frame_shows_the_peak_and_means() -> None:
    rank = gpu_rank(0)
    running = Page(training.html(view(ranks=(rank,)))).text
    done = Page(training.html(view("done", ranks=(rank,)))).text
    assert "activations 10.0" in running
    assert "93 %" in running
    assert "activations 20.0" in done
    assert "used at peak" in done
    assert "mean util" in done
    assert "mean util" not in running
    assert "position:absolute" in training.html(view(ranks=(rank,)))
    assert "position:absolute" not in training.html(view("done", ranks=(rank,)))
    assert "88 %" in done
    assert "93 %" not in done


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_the_chart_of_the_last_frame_is_an_image_in_words_too(state: Any) -> None:
    page = Page(training.html(view(state)))
    assert not page.all("svg")
    (image,) = page.all("img")
    assert image["alt"].startswith("Loss over 50 steps: first 3.000, lowest 2.510")


def test_the_text_has_the_numbers_of_the_page() -> None:
    for state in STATES:
        frame = view(state)
        page = Page(training.html(frame))
        shown = re.sub(r"parameters [\d.]+, .*? GiB", "", page.text)
        assert numbers(shown) - numbers(training.text(frame)) == set()
        assert numbers(training.text(frame).split("\nrank 1:")[0]) - numbers(page.text) == set()


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_frames_of_a_run_have_the_same_rows(ranks: int) -> None:
    frames = [
        view("starting", ranks, ranks=unknown_ranks(ranks)),
        view("running", ranks, steps=1),
        view("running", ranks, steps=50, losses=LossHistory([math.nan] * 50)),
        view("running", ranks, steps=99),
        view("failed", ranks, steps=99, message="rank 1 raised ValueError"),
    ]
    pages = [Page(training.html(frame)) for frame in frames]
    assert {len(page.all("tr")) for page in pages} == {1 + min(ranks, 3 if ranks >= 16 else ranks)}
    assert len({_heights(page) for page in pages}) == 1
    assert len({len(training.text(frame).splitlines()) for frame in frames}) == 1


def _heights(page: Page) -> tuple[str, ...]:
    """The heights that blocks reserve, the chart's own insides left out."""
    chart = ("svg", "img", "path", "title")
    styles = [
        a.get("style", "") for tag, a in page.tags if tag in ("div", "td") and tag not in chart
    ]
    reserved = [s for s in styles if re.search(r"(?<![-\w])(?:min-)?height:(?!80px)", s)]
    return tuple(re.findall(r"(?<![-\w])(?:min-)?height:\d+px", " ".join(reserved)))


@pytest.mark.parametrize("state", ["running", "done"])
def test_a_training_panel_stays_small(state: Any) -> None:
    wave = [3 + math.sin(step / 700) + math.sin(step) / 5 for step in range(10_000)]
    frame = view(state, world=8, steps=10_000, total_steps=10_000, losses=LossHistory(wave))
    assert len(training.html(frame).encode()) <= 30_000
    assert len(training.text(frame)) < 3_000


def test_the_panel_of_64_ranks_stays_small() -> None:
    wave = history([3 + math.sin(step / 700) + math.sin(step) / 5 for step in range(10_000)])
    for state in STATES:
        frame = view(state, world=64, **wave, total_steps=20_000)
        assert len(training.html(frame).encode()) <= 60_000


def test_many_ranks_are_three_and_a_strip() -> None:
    frame = view(world=64)
    page = Page(training.html(frame))
    assert len(page.all("tr")) == 4
    for words in ("worst", "median", "best"):
        assert words in page.text
        assert words in training.text(frame)
    assert sum(a.get("title", "").startswith("rank ") for a in page.all("span")) == 64
    strip = [line for line in training.text(frame).splitlines() if set(line) <= set(BLOCKS + "?")]
    assert [len(line) for line in strip] == [64]
    assert "6 worst" in page.text


def test_fifteen_ranks_are_fifteen_rows() -> None:
    assert len(Page(training.html(view(world=15))).all("tr")) == 16


def test_the_message_and_the_notes_are_there() -> None:
    frame = view("failed", message="rank 1 raised ValueError", notes=("was put in train()",))
    for shown in (Page(training.html(frame)).text, training.text(frame)):
        assert "rank 1 raised ValueError" in shown
        assert "was put in train()" in shown
