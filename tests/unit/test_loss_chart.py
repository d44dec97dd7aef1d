"""The loss curve, and the history that it is drawn from."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from panel_records import Page, assert_harmless, history, view

from fsdp_magic.panels import loss_chart, training
from fsdp_magic.panels.loss_chart import LossChart
from fsdp_magic.panels.loss_history import LossHistory
from fsdp_magic.panels.parts import figure_text


def test_losses_that_are_not_finite_leave_a_gap_and_are_named() -> None:
    losses = [3.0] * 20 + [math.nan] * 10 + [2.0] * 10 + [math.inf] + [1.0] * 9
    source = training.html(view(**history(losses), first_step=200))
    path = next(a["d"] for a in Page(source).all("path") if a.get("stroke-width") == "2")
    assert path.count("M") == 3
    assert "nan" not in path
    assert "inf" not in path
    for shown in (Page(source).text, training.text(view(**history(losses), first_step=200))):
        assert "loss first not finite at step 221" in shown


@pytest.mark.parametrize(
    "losses",
    [
        [math.nan],
        [math.nan, math.inf, -math.inf],
        [1.0],
        [0.0, 0.0],
        [1e308, -1e308, 1e308],
        [5.0, 5.0, 5.0],
        [1.0, math.nan],
    ],
)
@pytest.mark.parametrize("state", ["running", "done"])
def test_odd_losses_are_drawn(losses: list[float], state: Any) -> None:
    frame = view(state, **history(losses))
    assert_harmless(training.html(frame))
    for attributes in Page(training.html(frame)).all("path"):
        assert re.fullmatch(r"[MLHVh\d. -]*", attributes["d"])
    assert figure_text(losses[-1]) in training.text(frame)


def test_one_wild_loss_does_not_flatten_the_rest() -> None:
    losses = [1e9] + [3.0 - 0.01 * step for step in range(99)]
    path = Page(training.html(view(**history(losses)))).all("path")[-2]["d"]
    heights = [float(value) for value in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert max(heights[1:]) - min(heights[1:]) > 20


def test_step_numbers_count_as_the_panel_does() -> None:
    chart = LossChart(losses=LossHistory([1.0, math.nan]), first_step=10, total_steps=None)
    assert chart.first_non_finite == 12


def test_the_axis_of_an_unknown_length_has_no_end_before_the_first_step() -> None:
    unknown = LossChart(losses=LossHistory(), first_step=0, total_steps=None)
    ended = LossChart(losses=LossHistory(), first_step=0, total_steps=None, is_last=True)
    assert "no step was finished" in loss_chart.html(ended, as_image=True)
    assert Page(loss_chart.html(unknown, as_image=False)).text.endswith("0 step")


# ---------------------------------------------------------------- the history


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_history_holds_the_means_of_equal_stretches(pieces: int) -> None:
    for count in (0, 1, 2, 119, 120, 121, 240, 241, 1_000, 4_321):
        losses = [math.sin(step) for step in range(count)]
        thinned = LossHistory()
        for piece in range(pieces):
            thinned.extend(losses[piece * count // pieces : (piece + 1) * count // pieces])
        length = 1
        while count > 120 * length:
            length *= 2
        parts = [losses[start : start + length] for start in range(0, count, length)]
        means = [sum(part) / len(part) for part in parts]
        assert [mean for _, mean in thinned.points] == pytest.approx(means)
        middles = [index * length + (len(part) - 1) / 2 for index, part in enumerate(parts)]
        assert [step for step, _ in thinned.points] == middles


def test_a_history_knows_its_ends_and_its_extremes() -> None:
    thinned = LossHistory([2.0, math.nan, 5.0, -math.inf, 1.0, 3.0])
    assert (thinned.count, thinned.first, thinned.last) == (6, 2.0, 3.0)
    assert (thinned.lowest, thinned.highest, thinned.first_non_finite) == (1.0, 5.0, 1)
    assert [mean for _, mean in thinned.points] == [2.0, None, 5.0, None, 1.0, 3.0]
    empty = LossHistory()
    assert (empty.first, empty.last, empty.lowest, empty.highest) == (None,) * 4


def test_a_stretch_with_a_loss_that_is_not_finite_stays_a_gap() -> None:
    losses = [1.0] * 1_000
    losses[700] = math.inf
    gaps = [step for step, mean in LossHistory(losses).points if mean is None]
    assert len(gaps) == 1
    assert abs(gaps[0] - 700) < 8
