"""The slider: what it says of a size, what it takes, and what stands in its place."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from panel_records import Page, assert_harmless
from tuner_records import CAPACITY, planned_bytes

from fsdp_magic.core.errors import UsageError
from fsdp_magic.notebook.slider import slider
from fsdp_magic.panels import slider_view
from fsdp_magic.panels.slider_view import SliderData, SliderSize

SIZES = (1, 2, 4, 8, 16, 24, 25, 32)


def size(number: int, **changes: Any) -> SliderSize:
    known: dict[str, Any] = {
        "peak_bytes": planned_bytes(number),
        "samples_per_second": 410 * number / (number + 6),
        "is_measured": number == 24,
    }
    return SliderSize(micro_batch_size=number, **(known | changes))


def data(**changes: Any) -> SliderData:
    usual: dict[str, Any] = {
        "sizes": [size(number) for number in SIZES],
        "value": 24,
        "capacity_bytes": CAPACITY,
    }
    return SliderData(**(usual | changes))


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (size(24), "24 → 75.7 GiB of 80.0 GiB (95 %), 328 samples/s, measured, fits"),
        (size(8), "8 → 38.9 GiB of 80.0 GiB (49 %), 234 samples/s, expected, fits"),
        (
            size(25),
            "25 → 78.0 GiB of 80.0 GiB (98 %), 331 samples/s, expected, inside the margin",
        ),
        (
            size(32, samples_per_second=None),
            "32 → 94.1 GiB of 80.0 GiB (118 %), expected, would run out of memory",
        ),
        (
            SliderSize(micro_batch_size=25, is_measured=True, ran_out=True),
            "25 → ran out of memory",
        ),
        (SliderSize(micro_batch_size=3), "3 → not known whether it fits"),
    ],
)
def test_a_line_says_what_a_size_takes_and_whether_it_fits(one: SliderSize, line: str) -> None:
    assert data().line(one) == line


def test_of_very_many_sizes_those_that_were_tried_stay() -> None:
    many = [size(number, is_measured=number in (7, 4093)) for number in range(1, 5001)]
    offered = [each.micro_batch_size for each in data(sizes=many, value=4321).offered]
    assert len(offered) < 520
    assert {1, 7, 4093, 4321} <= {*offered}
    assert data().offered == data().sizes


def test_what_stands_in_its_place_says_the_value_in_a_line() -> None:
    source, text = slider_view.html(data(), value=8), slider_view.text(data(), value=8)
    assert_harmless(source)
    assert len(text.splitlines()) == 1
    for words in (Page(source).text, text):
        assert "8 → 38.9 GiB of 80.0 GiB (49 %)" in words
        assert "the next %%fsdp_train uses 8" in words


def test_there_is_no_slider_without_anywidget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    assert slider(data(), lambda size: None) is None


# ---------------------------------------------------------------- with the extra installed


@pytest.fixture
def taken() -> list[int]:
    return []


@pytest.fixture
def widget(taken: list[int]) -> Any:
    pytest.importorskip("anywidget", reason="pip install '.[widgets]' to test the slider")

    def take(size: int) -> None:
        if size == 8:
            raise UsageError("8 is refused:\ntype 16")
        taken.append(size)

    return slider(data(), take)


def test_a_size_that_is_taken_is_said_and_kept(widget: Any, taken: list[int]) -> None:
    assert (widget.value, widget.answer) == (24, "the next %%fsdp_train uses 24")
    widget._handle_custom_msg({"size": 16}, [])
    assert (widget.value, widget.answer) == (16, "the next %%fsdp_train uses 16")
    assert taken == [16]
    bundle, _ = widget._repr_mimebundle_()
    assert bundle["text/plain"].startswith("Batch size  16 → ")
    assert "text/html" in bundle
    assert any("widget-view" in kind for kind in bundle)


def test_a_size_that_is_refused_leaves_the_one_before(widget: Any, taken: list[int]) -> None:
    for number in (1, 2):
        widget._handle_custom_msg({"size": 8}, [])
        assert (widget.value, widget.answer) == (24, "8 is refused: type 16")
        assert widget.answered == number
    assert taken == []


def test_what_is_no_size_of_the_slider_is_not_asked_for(widget: Any, taken: list[int]) -> None:
    for content in ({"size": 3}, {"size": "16"}, {"size": None}, {}, "16", None):
        widget._handle_custom_msg(content, [])
    assert (taken, widget.answered) == ([], 0)


def test_the_page_knows_of_every_stop_what_the_kernel_says(widget: Any) -> None:
    assert [stop["size"] for stop in widget.stops] == [*SIZES]
    assert widget.stops[5]["line"] == data().line(size(24))
    assert widget.stops[5]["share"] == pytest.approx(75.7 / 80)
