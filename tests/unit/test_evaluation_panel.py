"""The card of an evaluation, and the lines that a training panel has of one."""

from __future__ import annotations

import math
import re

import pytest
from panel_records import HOSTILE, Page, assert_harmless, evaluated, evaluation_record, view

from fsdp_magic.panels import evaluation, training

WORDS = (
    "Evaluation after step 1,200", "2.413", "accuracy", "0.9312", "13,000 samples", "12.4 s",
    "collected logits, label: 13,000 rows", "collected rare: 1 row", "read once", "18:31:02",
)  # fmt: skip


def test_the_card_and_its_text_say_the_same() -> None:
    for shown in (Page(evaluation.html(evaluated())).text, evaluation.text(evaluated())):
        assert [words for words in WORDS if words not in shown] == []


def test_what_is_not_there_is_left_out() -> None:
    bare = evaluated(loss=None, metrics={}, rows={}, samples=0, notes=(), seconds=90)
    for shown in (Page(evaluation.html(bare)).text, evaluation.text(bare)):
        assert "loss" not in shown
        assert "samples" not in shown
        assert "collected" not in shown
        assert "01:30" in shown


@pytest.mark.parametrize("changes", [{"loss": math.nan}, {"metrics": {"a": math.inf}}])
def test_a_number_that_is_not_finite_has_a_sign_beside_it(changes: dict[str, object]) -> None:
    assert "✕" not in Page(evaluation.html(evaluated())).text
    assert re.search("✕ (nan|inf)", Page(evaluation.html(evaluated(**changes))).text)


def test_a_hostile_card_is_harmless() -> None:
    card = evaluated(
        metrics={HOSTILE: 1.0}, rows={HOSTILE: 2}, notes=(HOSTILE,), stamp=HOSTILE
    )  # fmt: skip
    assert_harmless(evaluation.html(card))
    assert "\x1b" not in evaluation.text(card)
    assert len(evaluation.text(card).splitlines()) == 4
    frame = view(
        metrics={HOSTILE: 1.0}, evaluates=True, evaluation=evaluation_record(metrics={HOSTILE: 1})
    )
    assert_harmless(training.html(frame))
    assert "\x1b" not in training.text(frame)


def test_a_training_panel_shows_metrics_and_the_newest_evaluation() -> None:
    frame = view(metrics={"accuracy": 0.75}, evaluates=True, evaluation=evaluation_record())
    for shown in (Page(training.html(frame)).text, training.text(frame)):
        words = " ".join(shown.split())
        assert "accuracy 0.7500" in words
        assert "evaluated at step 40 eval loss 1.250 eval f1 0.5000" in words


def test_a_run_that_evaluates_or_binds_metrics_has_their_place_from_the_first_frame_on() -> None:
    before = view(evaluates=True, binds_metrics=True)
    after = view(evaluates=True, evaluation=evaluation_record(), metrics={"accuracy": 0.75})
    for shown in (Page(training.html(before)).text, training.text(before)):
        assert "evaluated at step n/a" in shown
        assert "metrics n/a" in shown
    assert len(training.text(before).splitlines()) == len(training.text(after).splitlines())
    assert "evaluated" not in training.text(view())
    assert "metrics" not in training.text(view())


def test_an_evaluation_without_a_loss_shows_its_metrics() -> None:
    frame = view(evaluates=True, evaluation=evaluation_record(loss=None))
    assert "evaluated at step 40  eval f1 0.5000" in training.text(frame)
