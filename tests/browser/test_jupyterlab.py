"""What a person sees in JupyterLab, from every side; see ``tour.py`` for what was done there."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import pytest
from lab import Notebook, chromium, jupyterlab, missing, write_notebook
from tour import (
    AFTER,
    ATTACK,
    CELL,
    CELLS,
    INIT,
    MODEL,
    QUEUED,
    RAISES,
    SHOWN,
    SIZED,
    STATUS,
    TRAIN,
    TUNE,
    WRONG,
    Seen,
    play,
)

pytestmark = pytest.mark.timeout(170)  # the first test waits for the whole session


@pytest.fixture(scope="module")
def seen(test_run: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Play the session, end everything, and return what was seen."""
    if reason := missing():
        if os.environ.get("FSDP_MAGIC_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("lab")
    pictures = Path(os.environ.get("FSDP_MAGIC_SCREENSHOTS") or directory / "screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    with jupyterlab(directory) as server, chromium(directory) as page:
        write_notebook(server.root / "tour.ipynb", [CELLS[index] for index in sorted(CELLS)])
        try:
            play(Notebook(page, server, "tour.ipynb"), server, seen, pictures)
        except Exception:
            page.screenshot(path=pictures / "failure.png")
            print(page.locator("body").inner_text())
            raise
    return seen


# ---------------------------------------------------------------- a run under way


def test_progress_advances_while_the_kernel_is_busy(seen: Seen) -> None:
    statuses, steps = zip(*seen.progress, strict=True)
    assert statuses == ("busy", "busy")
    assert steps[0] < steps[1], f"the page stood still at {steps}"
    assert "Running" in seen.running


def test_an_interrupt_stops_the_run_and_no_queued_cell_runs(seen: Seen) -> None:
    assert seen.stopping_seconds < 5
    assert "Stopped" in seen.output[TRAIN]
    assert "Running" not in seen.output[TRAIN]
    assert [prompt.strip("[]: ") for prompt in seen.prompts[: TRAIN + 1]] == list("12345")
    assert {prompt.strip("[]: ") for prompt in seen.prompts[QUEUED:]} == {""}


def test_an_interrupt_is_one_line_beneath_the_panel(seen: Seen) -> None:
    last = seen.output[TRAIN].strip().splitlines()[-1]
    assert re.fullmatch(r"Training stopped after step \d+; --resume takes the other [\d,]+\.", last)
    assert "Traceback" not in seen.output[TRAIN]


def test_a_cell_after_the_interrupt_runs_on_the_same_engines(seen: Seen) -> None:
    assert seen.output[AFTER].strip() == "[ranks 0-1] the session goes on"


def test_a_page_that_is_reloaded_during_a_run_shows_where_it_stood_and_later_how_it_ended(
    seen: Seen,
) -> None:
    status, panel = seen.reloaded
    assert status in ("busy", "unknown"), "the run had ended already"
    assert "Running" in panel
    assert re.search(r"\d\d:\d\d:\d\d", panel), "nobody can tell how old the panel is"
    assert "Done 100 %" in seen.output[STATUS], "of the run that the page has lost"
    assert "2 ranks" in seen.output[STATUS]


# ---------------------------------------------------------------- what ranks print and show


def test_a_search_for_the_batch_size_is_drawn_while_the_kernel_is_busy(seen: Seen) -> None:
    status, searching = seen.tuning
    assert status == "busy"
    assert "trying" in searching
    assert "fastest micro-batch 16" in seen.output[TUNE]
    assert "trying" not in seen.output[TUNE]


def test_the_slider_sets_the_size_of_the_next_training_cell(seen: Seen) -> None:
    assert seen.slid == ("the next %%fsdp_train uses 16", "the next %%fsdp_train uses 15")
    assert "15 × 1 × 2 ranks = 30 samples a step" in seen.output[SIZED]


def test_the_last_chart_of_a_search_is_a_picture_in_the_file(seen: Seen) -> None:
    assert "fastest micro-batch 16" in seen.copy[TUNE]
    assert seen.chart_width > 0


def test_equal_lines_of_ranks_are_one_and_others_are_labelled(seen: Seen) -> None:
    lines = seen.output[CELL].split("\n")
    for line in ("[ranks 0-1] ready", "[rank 0] this is rank 0", "[rank 1] this is rank 1"):
        assert lines.count(line) == 1


def test_a_progress_bar_of_all_ranks_is_one_line_that_moves(seen: Seen) -> None:
    bar = re.compile(r"^\[ranks 0-1\] reading: +(\d+)%.*$", re.M)
    for text in (seen.bar, seen.output[SHOWN]):
        assert len(bar.findall(text)) == 1, text
    assert bar.findall(seen.output[SHOWN]) == ["100"]


def test_what_ranks_display_is_shown_once_as_itself(seen: Seen) -> None:
    assert seen.shown_html == 1
    assert seen.output[SHOWN].count("shown by all ranks") == 1


def test_an_error_names_the_rank_and_shows_the_persons_line(seen: Seen) -> None:
    text = seen.output[RAISES]
    for words in ("rank 1", "ValueError", 'raise ValueError("', ATTACK):
        assert words in text
    assert "site-packages" not in text


def test_a_wrong_option_is_one_line(seen: Seen) -> None:
    assert len(seen.output[WRONG].strip().splitlines()) == 1
    assert "--device" in seen.output[WRONG]


def test_names_and_texts_of_the_person_run_nothing(seen: Seen) -> None:
    assert ATTACK in seen.output[MODEL], "the name is not shown, so nothing was tested"
    assert seen.attacks == {"page": [None, 0], "copy": [None, 0]}


# ---------------------------------------------------------------- help


def test_tab_offers_the_options_of_a_magic(seen: Seen) -> None:
    assert {"--micro-batch-size", "--max-grad-norm", "--manual"} <= set(seen.options)
    assert all(option.startswith("--m") for option in seen.options)


def test_tab_offers_what_the_engines_have(seen: Seen) -> None:
    assert any("named_parameters" in name for name in seen.names), seen.names


def test_an_opened_row_of_the_mosaic_stays_open(seen: Seen) -> None:
    assert seen.open_rows == 1


# ---------------------------------------------------------------- what stays


def test_pictures_were_taken_on_a_dark_page_too(seen: Seen) -> None:
    red, green, blue = map(int, re.findall(r"\d+", seen.background)[:3])
    assert max(red, green, blue) < 60


def test_the_last_panel_and_the_mosaic_are_there_untrusted_and_without_a_kernel(
    seen: Seen,
) -> None:
    assert seen.copy_status is None
    for word in ("Stopped", "used at peak", "rank", "gradient norm"):
        assert word in seen.copy[TRAIN]
    for word in ("full_shard on 2 ranks", "rank 1", "{1…4}", "total"):
        assert word in seen.copy[MODEL]
    assert seen.pictures, "the loss is a picture"
    assert min(seen.pictures) > 100, "the picture could not be drawn"
    assert min(seen.bars.values()) >= 2, f"bars without a colour: {seen.bars}"


@pytest.mark.parametrize(
    ("index", "count", "limit_kib"),
    [(INIT, 1, 30), (MODEL, 1, 50), (TRAIN, 1, 30), (STATUS, 2, 30)],
)
def test_every_saved_panel_has_a_text_twin_and_stays_small(
    seen: Seen, index: int, count: int, limit_kib: int
) -> None:
    bundles = [output["data"] for output in seen.saved[index] if "data" in output]
    assert len(bundles) == count, "a panel, and no text of Out beneath it"
    for bundle in bundles:
        html, text = ("".join(bundle[kind]) for kind in ("text/html", "text/plain"))
        assert len(html.encode()) <= limit_kib * 1024
        assert text.strip()
        assert "<" not in text.replace(ATTACK, "")


def test_the_saved_chart_shows_the_whole_run(seen: Seen) -> None:
    html = "".join("".join(o["data"]["text/html"]) for o in seen.saved[TRAIN] if "data" in o)
    drawing = re.search(r"data:image/svg\+xml;base64,([^\"]+)", html)
    assert drawing is not None
    steps = re.search(r"Loss over (\d+) steps", base64.b64decode(drawing[1]).decode())
    assert steps is not None
    assert f"{steps[1]}/2,000" in seen.output[TRAIN]
