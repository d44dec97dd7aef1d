"""The bars: their parts, their scale, their unit, their warning."""

from __future__ import annotations

import re

import pytest
from panel_records import Page, memory, one_rank, view

from fsdp_magic.core.telemetry import MemorySample
from fsdp_magic.core.units import GIB, MIB
from fsdp_magic.panels import training
from fsdp_magic.panels.gauges import Gauge, bar, parts_of, share, unit_of
from fsdp_magic.panels.parts import memory_unit
from fsdp_magic.panels.training_view import RankView


@pytest.mark.parametrize(
    "sample",
    [
        memory(),
        memory(reserved_bytes=90 * GIB),
        memory(parameter_bytes=70 * GIB),
        memory(allocated_bytes=0, reserved_bytes=0),
        memory(used_bytes=0),
    ],
)
def test_the_parts_of_a_bar_add_up_to_used(sample: MemorySample) -> None:
    parts = parts_of(sample)
    assert sum(parts) == sample.used_bytes
    assert min(parts) >= 0


def test_the_parts_of_a_bar_are_what_they_are_called() -> None:
    assert [size // GIB for size in parts_of(memory(10))] == [6, 6, 24, 10, 2, 1]


def test_the_boxes_of_a_bar_are_as_long_as_its_parts() -> None:
    gauge = Gauge(rank=0, device_name="", memory=memory(10), peak_bytes=60 * GIB)
    page = Page(bar(gauge, unit=unit_of([gauge]), largest=1))
    widths = [
        float(found[1])
        for attributes in page.all("span")
        if (found := re.match(r"width:([\d.]+)%", attributes.get("style", "")))
    ]
    assert widths == pytest.approx([100 * part / 80 for part in (6, 6, 24, 10, 2, 1)], abs=0.01)
    assert "left:75.00%" in bar(gauge, unit=unit_of([gauge]), largest=1)


def test_without_a_capacity_a_full_bar_is_the_largest_peak() -> None:
    gauge = Gauge(
        rank=0, device_name="", memory=memory(10, capacity_bytes=None), peak_bytes=60 * GIB
    )
    assert share(gauge, 60 * GIB, 60 * GIB) == 1.0
    assert share(gauge, 30 * GIB, 60 * GIB) == 0.5


def test_a_device_that_would_leave_every_bar_empty_is_no_measure_and_that_is_said() -> None:
    sample = memory(used_bytes=150 * MIB, capacity_bytes=12 * GIB)
    frame = view("done", ranks=(RankView(rank=0, device_name="", memory=None, peak_memory=sample),))
    for shown in (Page(training.html(frame)).text, training.text(frame)):
        assert "full bar 192 MiB" in shown
        assert "12.0 GiB" in shown
    half_full = memory(used_bytes=6 * GIB, capacity_bytes=12 * GIB)
    rank = RankView(rank=0, device_name="", memory=None, peak_memory=half_full)
    assert "full bar" not in training.text(view("done", ranks=(rank,)))


@pytest.mark.parametrize(
    ("largest", "count", "expected"),
    [
        (80 * GIB, 3 * GIB // 2, "1.5 GiB"),
        (2 * GIB, 100 * MIB, "0.10 GiB"),
        (500 * MIB, 100 * MIB, "100 MiB"),
        (None, None, "n/a GiB"),
    ],
)
def test_a_panel_has_one_unit(largest: int | None, count: int | None, expected: str) -> None:
    unit = memory_unit([largest, 1])
    if largest is None:
        unit = memory_unit([None])
    assert f"{unit.text(count)} {unit.name}" == expected


def test_a_rank_that_is_nearly_full_is_marked_but_not_for_its_cache() -> None:
    full, cached = memory(40), memory(10, reserved_bytes=78 * GIB, used_bytes=79 * GIB)
    marked = training.html(one_rank(full))
    assert "▲" in marked
    assert "of the capacity at the peak" in marked
    calm = training.html(one_rank(cached))
    assert "▲" not in calm
    assert "△" not in calm
