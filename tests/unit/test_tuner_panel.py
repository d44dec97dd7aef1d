"""The tuner's panel: its chart, its words, its tables; as HTML and as text."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from panel_records import Page, assert_harmless
from tuner_records import CAPACITY, planned_bytes, probe, search, tuned_rows

from fsdp_magic.core.units import GIB, MIB
from fsdp_magic.panels import tuner, tuner_chart
from fsdp_magic.panels.label_places import NARROW, WIDE, Label, Point, Spot, place, text_width
from fsdp_magic.panels.tuner_picture import HEIGHT
from fsdp_magic.panels.tuner_scale import curve, memory_axis, size_axis
from fsdp_magic.panels.tuner_view import ProbeView, TunerView

DECADES = [2**power for power in range(13)]


def decades(*more: int, **changes: Any) -> TunerView:
    """Sizes that were doubled from 1 to 4,096, and what came after them."""
    probes = [
        ProbeView(micro_batch_size=size, fits=size < 4096, peak_bytes=30 * MIB + size * 100_000)
        for size in [*DECADES, *more]
    ]
    return search(probes=probes, planned=(), capacity_bytes=400 * MIB, pick=2048, **changes)


def frames() -> list[TunerView]:
    """Searches of every kind, from their first frame to their ends."""
    nothing = search(state="planning", planned=(), capacity_bytes=None)
    hopeless = search(state="done", probes=[probe(1, fits=False, peak_bytes=None)])
    return [
        nothing,
        search(trying=1),
        search(1, trying=24),
        search(1, 2, 4, 8, 16, trying=32, planned=()),
        search(1, 23, 24, 25, state="done"),
        search(1, 16, state="stopped"),
        search(1, state="failed"),
        search(1, state="done", capacity_bytes=CAPACITY * 64),
        search(1, 2, capacity_bytes=None, planned=()),
        hopeless,
        decades(3072, 3584, state="done"),
        search(1000, 1010, 1012, planned=(), capacity_bytes=planned_bytes(1011)),
    ]


def picture(view: TunerView) -> ElementTree.Element:
    """Return the drawing of a last frame, parsed."""
    address = Page(tuner.html(view)).all("img")[0]["src"]
    return ElementTree.fromstring(base64.b64decode(address.partition(",")[2]))


# ---------------------------------------------------------------- what is said


def test_panel_and_text_say_the_same_figures() -> None:
    done = search(1, 23, 24, 25, state="done", ended_by="25 ran out of memory on rank 1")
    for words in (Page(tuner.html(done)).text, tuner.text(done)):
        for said in (
            *("largest micro-batch 24", "24 × 4 × 2 ranks = 192 samples a step"),
            *("4 probes in 6.1 s", "24: 75.7 GiB (95 %)", "25 ran out of memory on rank 1"),
            *("fits, largest", "✕ out of memory on rank 1", "328", "73.4", "80.0 GiB", "5 %"),
        ):
            assert said in " ".join(words.split())


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (search(state="planning"), "planning what each size takes"),
        (search(1, trying=24), "searching, trying 24 …  1 fits so far"),
        (
            search(1, 24, 12, state="done", objective="throughput", pick=12),
            "fastest micro-batch 12",
        ),
        (search(25, state="done"), "not even the smallest size fits"),
        (search(1, 16, state="stopped"), "stopped, 16 fits so far"),
        (search(state="failed"), "failed"),
        (search(1, state="done", rows=tuned_rows(6)), "largest micro-batch 19, full_shard+cpu"),
    ],
)
def test_the_first_line_of_the_text_tells_of_the_search_by_itself(
    view: TunerView, said: str
) -> None:
    assert tuner.text(view).partition("\n")[0].startswith(f"Batch size  {said}")
    assert said.partition("  ")[0] in Page(tuner.html(view)).text


def test_a_row_for_each_size_says_what_came_of_it_in_words() -> None:
    inside = probe(24, fits=False, why="inside the margin", samples_per_second=None)
    text = tuner.text(search(trying=8, probes=[probe(1), inside, probe(25)], pick=1))
    for row in (
        r"1 +22\.8 +28 % +58\.6  ✓ fits, largest",
        r"24 +75\.7 +95 % +n/a  ✕ inside the margin",
        r"25 +n/a +n/a +n/a  ✕ out of memory on rank 1",
        r"8 +○ trying",
    ):
        assert re.search(f"^ *{row}$", text, re.MULTILINE)


def test_every_strategy_has_a_row_from_first_to_last() -> None:
    rows = tuned_rows(8)
    for count in range(9):
        searched = search(1, rows=rows[:count], pending=[row.name for row in rows[count:]])
        assert len(Page(tuner.html(searched)).all("tr")) == 1 + 8 + 1 + 1
        text = tuner.text(searched)
        for row in rows:
            assert len(re.findall(rf"^{re.escape(row.name)}(?: |$)", text, re.MULTILINE)) == 1
        assert len(re.findall("to come$", text, re.MULTILINE)) == 8 - count
    both = (tuner.text(searched), Page(tuner.html(searched)).text)
    for words in both:
        assert "full_shard (as now)" in words
        assert "ValueError: no such thing" in words
    assert "hybrid_shard (best)" in both[0]
    assert "✓ hybrid_shard, best" in both[1]


def test_what_ended_a_search_is_said_of_its_strategy_in_a_table() -> None:
    ended: dict[str, Any] = {"state": "done", "ended_by": "25 leaves 2.5 % free on rank 1"}
    for words in (tuner.text(search(1, **ended)), Page(tuner.html(search(1, **ended))).text):
        assert "25 leaves 2.5 % free on rank 1" in words
        assert "full_shard: 25" not in words
    several = search(1, rows=tuned_rows(), **ended)
    for words in (tuner.text(several), Page(tuner.html(several)).text):
        assert "full_shard: 25 leaves 2.5 % free on rank 1" in words


def test_a_size_is_called_the_fastest_only_at_the_end() -> None:
    wanted: dict[str, Any] = {"objective": "throughput", "pick": 8}
    assert "fits, largest" in tuner.text(search(1, 8, **wanted))
    assert "fits, fastest" in tuner.text(search(1, 8, 24, state="done", **wanted))


# ---------------------------------------------------------------- the chart


def test_signs_stand_at_their_size_and_at_their_peak() -> None:
    done = search(1, 16, 24, 25, state="done")
    sizes, memory = size_axis(done), memory_axis(done)
    circles = [c.attrib for c in picture(done).findall("{*}circle")]
    dots = [(float(c["cx"][:-1]), float(c["cy"])) for c in circles if c["fill"] != "none"]
    for size, (left, top) in zip((1, 16, 24), dots, strict=True):
        assert sizes.size(left) == pytest.approx(size, abs=0.01)
        share = planned_bytes(size) / memory.top_bytes
        assert 1 - top / memory.top(0) == pytest.approx(share, abs=0.001)
    (ring,) = [c for c in circles if c["fill"] == "none"]
    assert (float(ring["cx"][:-1]), float(ring["cy"])) == dots[2]
    (cross,) = [e for e in picture(done).findall("{*}svg") if e.get("overflow") and len(e) and
                e[0].tag.endswith("path")]  # fmt: skip
    assert float(cross.attrib["y"]) < memory.top(CAPACITY)


def test_a_measured_peak_that_does_not_fit_is_where_it_was_measured() -> None:
    margin = search(probes=[probe(1), probe(25, peak_bytes=planned_bytes(25))], pick=1)
    assert 'y="' + f"{memory_axis(margin).top(planned_bytes(25)):.1f}" in tuner.html(margin)


def test_bars_are_as_high_as_the_speed() -> None:
    done = search(1, 16, 24, state="done")
    heights = [float(e.attrib["height"]) for e in picture(done).findall(".//{*}rect")]
    speeds = [p.samples_per_second or 0 for p in done.probes]
    assert [h / heights[-1] for h in heights] == pytest.approx(
        [s / speeds[-1] for s in speeds], abs=0.01
    )


def test_the_dashed_line_is_the_plan_or_a_line_through_what_was_measured() -> None:
    for view, name in (
        (search(1, 8), "predicted"),
        (search(1, 8, planned=()), "line through the dots"),
    ):
        sizes, memory = size_axis(view), memory_axis(view)
        points = curve(view, sizes, memory)
        assert len(points) > 10
        for left, top in points:
            expected = memory.top(planned_bytes(1) + 2.3 * GIB * (sizes.size(left) - 1))
            assert top == pytest.approx(expected, abs=0.1)
        assert name in Page(tuner.html(view)).text
    assert "line through" not in tuner.html(search(1, planned=()))


def test_sizes_are_linear_unless_they_were_doubled_over_decades() -> None:
    for view in (
        search(1, 24, 25),
        search(1, 2, 4, 8, 16, planned=()),
        search(1, 4096, planned=()),
    ):
        assert not size_axis(view).is_logarithmic
    assert size_axis(decades(3072, 3584)).is_logarithmic
    assert "logarithmic" in tuner.html(decades())


@pytest.mark.parametrize("number", range(len(frames())))
def test_figures_of_an_axis_never_overlap_and_signs_stay_inside(number: int) -> None:
    view = frames()[number]
    sizes, memory = size_axis(view), memory_axis(view)
    ticks = sizes.ticks([size for size in (view.pick, view.trying) if size])
    assert 1 <= len(ticks) <= 9
    for one, other in combinations(ticks, 2):
        apart = abs(sizes.left(one) - sizes.left(other)) * NARROW / 100
        assert apart > (text_width(f"{one:,}") + text_width(f"{other:,}")) / 2
    heights = [memory.top(count) for count, _ in memory.ticks()]
    assert min((a - b for a, b in pairwise(heights)), default=190) > 14
    for size in [*(p.micro_batch_size for p in view.probes), *ticks]:
        assert 0 <= sizes.left(size) <= 100
    assert_harmless(tuner.html(view))


@pytest.mark.parametrize("number", range(len(frames())))
def test_the_chart_has_one_height_and_is_an_image_at_the_end(number: int) -> None:
    view = frames()[number]
    is_over = view.state in ("done", "stopped", "failed")
    source = tuner.html(view)
    assert len(Page(source).all("img")) == is_over
    assert ("<svg" in source) != is_over
    assert f"position:relative;height:{HEIGHT + 34}px" in source
    assert len(source) < 30_000


def test_a_capacity_far_above_is_said_instead_of_drawn() -> None:
    far = search(1, state="done", capacity_bytes=64 * CAPACITY)
    assert "capacity, far above" in Page(tuner.html(far)).text
    assert memory_axis(far).top_bytes < CAPACITY
    assert memory_axis(replace(far, state="searching")).capacity_bytes == 64 * CAPACITY


def test_the_picture_is_told_in_words() -> None:
    done = search(1, 24, 25, state="done")
    alt = Page(tuner.html(done)).all("img")[0]["alt"]
    assert alt == tuner_chart.words(done)
    assert "fits: 1, 24; does not fit: 25; found: 24; capacity 80.0 GiB" in alt


# ---------------------------------------------------------------- words in a picture


def test_labels_stand_where_they_cover_nothing() -> None:
    left, right = Spot(0.0, 10.0, 4.0), Spot(100.0, 10.0, -4.0)
    one, fixed = Label("words", [left, right]), Label("other words", [left])
    assert place([one], marks=[], lines=[]) == [(one, left)]
    assert place([one], marks=[Point(5.0, 15.0)], lines=[]) == [(one, right)]
    assert place([fixed, one], marks=[], lines=[]) == [(fixed, left), (one, right)]
    off = Label("words", [Spot(99.0, 0.0, 4.0), left])
    assert place([off], marks=[], lines=[]) == [(off, left)]
    spare = Label("more", [left], is_optional=True)
    assert place([fixed, spare], marks=[], lines=[]) == [(fixed, left)]


@pytest.mark.parametrize("number", range(len(frames())))
def test_no_words_of_the_chart_lie_over_others_or_off_the_page(number: int) -> None:
    labels = _labels(tuner.html(frames()[number]))
    for width in (NARROW, 400, WIDE):
        boxes = [label.box(spot, width) for label, spot in labels]
        assert all(box[0] >= 0 and box[2] <= width for box in boxes)
        for one, other in combinations(boxes, 2):
            apart = one[2] <= other[0] or other[2] <= one[0]
            assert apart or one[3] <= other[1] or other[3] <= one[1]


def _labels(source: str) -> list[tuple[Label, Spot]]:
    """Return the words that stand in the picture, with their places."""
    pattern = (
        r"position:absolute;(left|right):([\d.]+)%;margin-(?:left|right):(\d+)px;top:([\d.]+)px;"
        r'line-height:13px;white-space:nowrap">(<b>)?([^<]+)'
    )
    found = []
    for side, share, shift, top, strong, text in re.findall(pattern, source):
        spot = Spot(float(share), float(top), float(shift))
        if side == "right":
            spot = Spot(100 - spot.left, spot.top, -spot.shift)
        found.append((Label(text.strip(), [spot], is_strong=bool(strong)), spot))
    return found
