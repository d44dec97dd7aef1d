"""A run as the notebook holds it: what arrives piece by piece adds up to what the ranks did."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from panel_records import memory

from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.telemetry import (
    DeviceSample,
    MetricRecord,
    ProgressReport,
    RunReport,
    StepRecords,
)
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.training import TrainingPanel, _binds_metrics

WORLD, STEPS = 3, 40


def share(rank: int, step: int) -> float:
    return math.sin(rank + step)


def records(rank: int, first: int, last: int) -> StepRecords:
    steps = range(first, last)
    return StepRecords(
        first=first,
        losses=tuple(share(rank, step) for step in steps),
        grad_norms=tuple(1.0 + step for step in steps),
        samples=tuple(rank + 1 for _ in steps),
        tokens=tuple(10 * (rank + 1) for _ in steps),
        metrics=tuple(
            MetricRecord(name="even", step=step, total=2.0 * step, weight=2.0)
            for step in steps
            if step % 2 == 0
        ),
    )


def report(kind: Any, rank: int, first: int, last: int, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "rank": rank,
        "steps": last,
        "total_steps": STEPS,
        "records": records(rank, first, last),
        "memory": memory(),
        "peak_memory": memory(),
        "seconds": 0.5 * last,
        "device_name": "gpu",
        "first_step": 0,
        "micro_batch_size": 8,
    }
    return kind(**(values | changes))


def progress(run: Run, rank: int, first: int, last: int) -> None:
    run.add(report(ProgressReport, rank, first, last, run_id=1, activity=DeviceSample()))


@pytest.fixture
def run() -> Run:
    return Run(run_id=1, world_size=WORLD, accumulate=1)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_counts_once_every_rank_has_reported_it(run: Run, seed: int) -> None:
    chance = random.Random(seed)
    done = [0] * WORLD
    drawn = TrainingPanel(run, TrainSpec(), show=False)
    while min(done) < STEPS:
        rank = chance.randrange(WORLD)
        last = min(STEPS, done[rank] + chance.randrange(1, 8))
        progress(run, rank, done[rank], last)
        done[rank] = last
        least = min(done)
        losses = [sum(share(r, step) for r in range(WORLD)) for step in range(least)]
        assert run.losses == pytest.approx(losses)
        assert run.steps == drawn.view().losses.count == least
        assert drawn.view().losses.last == (pytest.approx(losses[-1]) if losses else None)
        taken = sum((rank + 1) * steps for rank, steps in enumerate(done))
        assert run.samples_per_second == pytest.approx(taken / run.seconds)
        if all(done):
            assert run.tokens_per_second == pytest.approx(10 * taken / run.seconds)
            assert run.newest_metrics == {"even": (least - 1) // 2 * 2}


def test_the_last_reports_take_the_place_of_what_came_before(run: Run) -> None:
    for rank in range(WORLD):
        progress(run, rank, 0, 10)
        progress(run, rank, 20, 30)  # a report between them was lost
    assert run.losses
    panel = TrainingPanel(run, TrainSpec(), show=False)
    panel.view()
    ends = [
        report(RunReport, rank, 0, STEPS, stopped=False, mean_activity=DeviceSample())
        for rank in range(WORLD)
    ]
    run.finish(ends)
    panel.finish()
    losses = [sum(share(r, step) for r in range(WORLD)) for step in range(STEPS)]
    assert run.losses == pytest.approx(losses)
    assert run.samples_per_second == pytest.approx(6 * STEPS / run.seconds)
    assert run.last_frame is not None
    assert f"Loss over {STEPS} steps" in run.last_frame[0]
    assert "step 40/40" in run.last_frame[1]


def test_losses_that_a_person_changes_are_theirs(run: Run) -> None:
    for rank in range(WORLD):
        progress(run, rank, 0, 5)
    run.losses.clear()
    assert len(run.losses) == 5


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("loss = model(batch)\nmetrics = {'a': 1}", True),
        ("if step % 10 == 0:\n    metrics = {'a': 1}\nloss = 1", True),
        ("loss = metrics['a']", False),
        ("!ls\nmetrics = 1", False),
        ("loss =", False),
    ],
)
def test_a_cell_that_binds_metrics_is_known_before_it_runs(cell: str, expected: bool) -> None:
    assert _binds_metrics(cell) == expected
