"""Learning rate schedulers on engines move as in a plain single-process loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fsdp_magic.errors import CellFailedError

BUILT = """
import torch
import torch.nn as nn
from torch.optim import lr_scheduler as lrs

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
optimizer = torch.optim.SGD(
    [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 0.05},
    ],
    lr=0.1,
    momentum=0.9,
)
generator = torch.Generator().manual_seed(2)
data = list(zip(
    torch.randn(32, 6, generator=generator, dtype=torch.float64),
    torch.randn(32, 3, generator=generator, dtype=torch.float64),
))
held_out = data[:13]
rates = []
"""
CELL = """
rates.append([group["lr"] for group in optimizer.param_groups])
x, y = batch
loss = (model(x) - y).pow(2).mean()
"""
EPOCH = 4
"""Steps of eight samples in one epoch."""
OPTIONS = {"data": "data", "no_shuffle": True, "micro_batch_size": 4, "show": False}

PER_STEP = {
    "LambdaLR": "lrs.LambdaLR(optimizer, lambda n: 0.9 ** n)",
    "CosineAnnealingLR": "lrs.CosineAnnealingLR(optimizer, T_max=8)",
    "CosineAnnealingWarmRestarts": "lrs.CosineAnnealingWarmRestarts(optimizer, T_0=3)",
    "OneCycleLR": "lrs.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)",
    "transformers": ("__import__('transformers').get_linear_schedule_with_warmup(optimizer, 2, 8)"),
    "SequentialLR": (
        "lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=3), "
        "lrs.CosineAnnealingLR(optimizer, T_max=5)], milestones=[3])"
    ),
    "ChainedScheduler": (
        "lrs.ChainedScheduler([lrs.LinearLR(optimizer, 0.5, total_iters=3), "
        "lrs.LambdaLR(optimizer, lambda n: 0.9 ** n)], optimizer=optimizer)"
    ),
    "CyclicLR": "lrs.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3)",
}
AMBIGUOUS = {
    "StepLR": "lrs.StepLR(optimizer, 2, gamma=0.5)",
    "MultiStepLR": "lrs.MultiStepLR(optimizer, [1, 5], gamma=0.5)",
    "ExponentialLR": "lrs.ExponentialLR(optimizer, 0.9)",
    "SequentialLR of one": (
        "lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=1), "
        "lrs.ExponentialLR(optimizer, 0.9)], milestones=[1])"
    ),
}


def by_itself(made: str, *, steps: int = 8, every: str = "step") -> tuple[list[Any], list[float]]:
    """Train in this process, and return the learning rates and losses."""
    names: dict[str, Any] = {}
    exec(f"{BUILT}\nscheduler = {made}", names)
    model, optimizer, scheduler = names["model"], names["optimizer"], names["scheduler"]
    rates, losses = [], []
    for step in range(steps):
        at = step % EPOCH * 8
        x, y = map(torch.stack, zip(*names["data"][at : at + 8], strict=True))
        rates.append([group["lr"] for group in optimizer.param_groups])
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if every == "step" or (step + 1) % EPOCH == 0:
            scheduler.step()
    return rates, losses


def build(session: Any, made: str, name: str = "scheduler = {}") -> None:
    """Build and shard, with every warning of torch an error from then on."""
    session.model(f"{BUILT}\n{name.format(made)}", show=False)
    session.run("import warnings\nwarnings.simplefilter('error')", show=False)


def compare(session: Any, losses: list[float], made: str, **options: Any) -> None:
    expected = by_itself(made, **options)
    np.testing.assert_allclose(session.pull("rates"), expected[0], rtol=1e-12)
    assert losses == pytest.approx(expected[1], rel=1e-9)


@pytest.fixture(autouse=True)
def _warnings_again(session):
    yield
    session.run("import warnings\nwarnings.resetwarnings()", show=False)


@pytest.mark.parametrize("kind", PER_STEP)
def test_a_scheduler_steps_with_its_optimizer(session, kind):
    build(session, PER_STEP[kind])
    run = session.train(CELL, steps=8, **OPTIONS)
    compare(session, run.losses, PER_STEP[kind])
    assert run.notes == []


@pytest.mark.parametrize("kind", PER_STEP)
def test_a_scheduler_goes_on_in_a_second_run(session, kind):
    build(session, PER_STEP[kind])
    losses = [
        loss for steps in (3, 5) for loss in session.train(CELL, steps=steps, **OPTIONS).losses
    ]
    compare(session, losses, PER_STEP[kind])


@pytest.mark.parametrize(
    "name",
    [
        "held = {{'schedulers': [{}]}}",
        "from types import SimpleNamespace\ntrainer = SimpleNamespace(scheduler={})",
        "first = {}\nsecond = first\nthird = [first]",
    ],
)
def test_a_scheduler_is_found_wherever_it_is_kept_and_steps_once(session, name):
    build(session, PER_STEP["LambdaLR"], name)
    run = session.train(CELL, steps=8, **OPTIONS)
    compare(session, run.losses, PER_STEP["LambdaLR"])


def test_parts_of_a_scheduler_that_have_names_do_not_step_by_themselves(session):
    parts = (
        "warm = lrs.LinearLR(optimizer, 0.1, total_iters=3)\n"
        "cosine = lrs.CosineAnnealingLR(optimizer, T_max=5)\n"
        "both = lrs.SequentialLR(optimizer, [warm, cosine], milestones=[3])"
    )
    build(session, parts, "{}")
    run = session.train(CELL, steps=8, **OPTIONS)
    compare(session, run.losses, PER_STEP["SequentialLR"])


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_one_that_may_count_epochs_is_refused_until_it_is_told(session, kind):
    build(session, AMBIGUOUS[kind])
    with pytest.raises(CellFailedError, match="--scheduler-every step or --scheduler-every epoch"):
        session.train(CELL, steps=8, **OPTIONS)
    assert session.pull("rates") == []


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_one_that_was_told_moves_as_in_one_process(session, kind, every):
    build(session, AMBIGUOUS[kind])
    run = session.train(CELL, steps=8, scheduler_every=every, **OPTIONS)
    compare(session, run.losses, AMBIGUOUS[kind], every=every)


@pytest.mark.parametrize("cuts", [(3, 5), (4, 4), (5, 3), (1, 7)])
def test_epochs_are_counted_over_runs(session, cuts):
    build(session, AMBIGUOUS["StepLR"].replace("2", "1"))
    losses = [
        loss
        for steps in cuts
        for loss in session.train(CELL, steps=steps, scheduler_every="epoch", **OPTIONS).losses
    ]
    compare(session, losses, AMBIGUOUS["StepLR"].replace("2", "1"), every="epoch")


def test_epochs_of_data_of_unknown_length_are_counted(session):
    made = AMBIGUOUS["ExponentialLR"]
    build(session, made)
    session.run(
        "class Stream(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter(data)\n"
        "stream = Stream()",
        show=False,
    )
    options = OPTIONS | {"data": "stream", "scheduler_every": "epoch"}
    losses = [loss for _ in range(2) for loss in session.train(CELL, **options).losses]
    compare(session, losses, made, every="epoch")


def test_two_optimizers_have_a_scheduler_each(session):
    """The one whose optimizer did not step stays."""
    session.model(
        BUILT + "other = nn.Linear(6, 3).double()\n"
        "second = torch.optim.SGD(other.parameters(), lr=0.1)\n"
        "schedulers = [lrs.LambdaLR(o, lambda n: 0.5 ** n) for o in (optimizer, second)]",
        show=False,
    )
    session.train(CELL, steps=3, **OPTIONS)
    rates = "[o.param_groups[0]['lr'] for o in (optimizer, second)]"
    assert session.pull(rates) == [0.1 * 0.5**3, 0.1]


@pytest.mark.parametrize(
    ("made", "note"),
    [
        (
            "lrs.CosineAnnealingLR(optimizer, T_max=100)",
            "scheduler is made for 100 steps; this run",
        ),
        (PER_STEP["SequentialLR"].replace("T_max=5", "T_max=9"), "is made for 12 steps"),
        (PER_STEP["transformers"].replace(", 8)", ", 20)"), "is made for 20 steps"),
        (PER_STEP["LambdaLR"], ""),
        ("lrs.LinearLR(optimizer, 0.1, total_iters=3)", ""),
    ],
)
def test_a_horizon_unlike_the_runs_is_noted(session, made, note):
    build(session, made)
    notes = session.train(CELL, steps=8, **OPTIONS).notes
    assert [n for n in notes if note in n] == notes
    assert bool(notes) == bool(note)


def test_a_horizon_in_epochs_is_compared_to_epochs(session):
    build(session, "lrs.CosineAnnealingLR(optimizer, T_max=2)")
    assert session.train(CELL, epochs=2, scheduler_every="epoch", **OPTIONS).notes == []


@pytest.mark.parametrize("inside", [False, True])
def test_a_schedule_too_short_is_refused_before_the_first_step(session, inside):
    made = "lrs.OneCycleLR(optimizer, max_lr=0.2, total_steps=5)"
    if inside:
        made = (
            "lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=2), "
            "lrs.OneCycleLR(optimizer, max_lr=0.2, total_steps=3)], milestones=[2])"
        )
    build(session, made)
    with pytest.raises(CellFailedError, match="ends after 5 steps") as caught:
        session.train(CELL, steps=8, **OPTIONS)
    assert "total_steps=8" in str(caught.value) or inside
    assert session.pull("rates") == []
    assert session.train(CELL, steps=5, **OPTIONS).state == "done"


PLATEAU = "lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)"


def test_a_plateau_waits_for_evaluations(session):
    build(session, PLATEAU)
    cell = "x, y = batch\nloss = (model(x) - y).pow(2).mean()\n"
    run = session.train(
        cell + "rates.append([group['lr'] for group in optimizer.param_groups]) "
        "if torch.is_grad_enabled() else None",
        steps=8, eval_every=2, eval_data="held_out", **OPTIONS,
    )  # fmt: skip
    names: dict[str, Any] = {}
    exec(f"{BUILT}\nscheduler = {PLATEAU}", names)
    model, optimizer = names["model"], names["optimizer"]
    rates, losses, evaluations = [], [], []
    for step in range(8):
        x, y = map(torch.stack, zip(*names["data"][step % 4 * 8 :][:8], strict=True))
        rates.append([group["lr"] for group in optimizer.param_groups])
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2:
            with torch.no_grad():
                x, y = map(torch.stack, zip(*names["held_out"], strict=True))
                evaluations.append((model(x) - y).pow(2).mean().item())
            names["scheduler"].step(evaluations[-1])
    assert rates[0] != rates[-1], "the case must reach a plateau"
    np.testing.assert_allclose(session.pull("rates"), rates, rtol=1e-12)
    assert run.losses == pytest.approx(losses, rel=1e-9)
    assert [record.loss for record in run.evaluations] == pytest.approx(evaluations, rel=1e-9)
    assert [record.step for record in run.evaluations] == [2, 4, 6, 8]


def test_a_plateau_without_evaluations_is_noted(session):
    build(session, PLATEAU)
    [note] = session.train(CELL, steps=2, **OPTIONS).notes
    assert "scheduler steps after an evaluation; add --eval-every N" in note


def test_a_plateau_that_waits_for_a_larger_value_is_refused(session):
    build(session, PLATEAU.replace("factor", "mode='max', factor"))
    with pytest.raises(CellFailedError, match="mode='max'"):
        session.train(CELL, steps=2, eval_every=1, eval_data="held_out", **OPTIONS)


def test_the_panel_shows_the_learning_rate_as_it_stands(session):
    session.model(BUILT + f"scheduler = {PER_STEP['LambdaLR']}", show=False)
    run = session.train(CELL, steps=2, **OPTIONS)
    assert run.learning_rate == pytest.approx(0.1 * 0.9**2)
    assert "learning rate 0.0810" in run.last_frame[1]
