"""The card of an evaluation, and the lines that a training panel has of one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from test_panels import HOSTILE, Page, assert_harmless, view

from fsdp_magic.core.telemetry import EvaluationRecord
from fsdp_magic.panels import evaluation, training
from fsdp_magic.panels.evaluation import EvaluationView
from fsdp_magic.panels.parts import RED


def evaluated(**changes: Any) -> EvaluationView:
    values: dict[str, Any] = {
        "step": 1200,
        "loss": 2.4132,
        "metrics": {"accuracy": 0.9312},
        "samples": 13_000,
        "seconds": 12.4,
        "rows": {"logits": 13_000, "label": 13_000, "rare": 1},
        "notes": ("read once",),
        "stamp": "18:31:02",
    }
    return EvaluationView(**(values | changes))


def record(**changes: Any) -> EvaluationRecord:
    values: dict[str, Any] = {"step": 40, "loss": 1.25, "metrics": {"f1": 0.5}, "samples": 9}
    return EvaluationRecord(**(values | changes))


WORDS = (
    "Evaluation after step 1,200", "2.413", "accuracy", "0.9312", "13,000 samples", "12.4 s",
    "collected logits, label: 13,000 rows", "collected rare: 1 row", "read once", "18:31:02",
)  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_the_card_and_its_text_say_the_same(words: str) -> None:
    assert words in Page(evaluation.html(evaluated())).text
    assert words in evaluation.text(evaluated())


def test_what_is_not_there_is_left_out() -> None:
    bare = evaluated(loss=None, metrics={}, rows={}, samples=0, notes=(), seconds=90)
    for shown in (Page(evaluation.html(bare)).text, evaluation.text(bare)):
        assert "loss" not in shown
        assert "samples" not in shown
        assert "collected" not in shown
        assert "01:30" in shown


def test_a_number_that_is_not_finite_is_red() -> None:
    assert RED not in evaluation.html(evaluated())
    assert RED in evaluation.html(evaluated(loss=math.nan))
    assert RED in evaluation.html(evaluated(metrics={"a": math.inf}))


def test_a_hostile_card_is_harmless() -> None:
    card = evaluated(
        metrics={HOSTILE: 1.0}, rows={HOSTILE: 2}, notes=(HOSTILE,), stamp=HOSTILE
    )  # fmt: skip
    assert_harmless(evaluation.html(card))
    assert "\x1b" not in evaluation.text(card)
    assert len(evaluation.text(card).splitlines()) == 4
    frame = view(metrics={HOSTILE: 1.0}, evaluates=True, evaluation=record(metrics={HOSTILE: 1}))
    assert_harmless(training.html(frame))
    assert "\x1b" not in training.text(frame)


def test_a_training_panel_shows_metrics_and_the_newest_evaluation() -> None:
    frame = view(metrics={"accuracy": 0.75}, evaluates=True, evaluation=record())
    for shown in (Page(training.html(frame)).text, training.text(frame)):
        words = " ".join(shown.split())
        assert "accuracy 0.7500" in words
        assert "evaluation after step 40: loss 1.250 f1 0.5000" in words


def test_a_run_that_evaluates_has_its_line_from_the_first_frame_on() -> None:
    before, after = view(evaluates=True), view(evaluates=True, evaluation=record())
    assert "evaluation: none yet" in training.text(before)
    assert len(training.text(before).splitlines()) == len(training.text(after).splitlines())
    assert "evaluation" not in training.text(view())


def test_an_evaluation_without_a_loss_shows_its_metrics() -> None:
    frame = view(evaluates=True, evaluation=record(loss=None))
    assert "evaluation after step 40: f1 0.5000" in training.text(frame)
