"""What a person hangs onto a run: --after-step, fsdp.stop(), --log, metrics, numbers by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import interrupted_after, stop_pressed

from fsdp_magic.errors import CellFailedError, CellInterrupted, UsageError

BUILT = """
import copy, time
import torch
import torch.nn as nn

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(2)
data = list(zip(
    torch.randn(32, 6, generator=generator, dtype=torch.float64),
    torch.randn(32, 3, generator=generator, dtype=torch.float64),
))
average = copy.deepcopy(model).requires_grad_(False)
told = []

@torch.no_grad()
def after():
    for mine, theirs in zip(average.parameters(), model.parameters()):
        mine.lerp_(theirs, 0.25)
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)

def tell(values):
    told.append(values)
"""
CELL = """
x, y = batch
loss = (model(x) - y).pow(2).mean()
"""
OPTIONS = {"data": "data", "no_shuffle": True, "micro_batch_size": 4, "show": False}


def by_itself(*, steps: int = 6, after: bool = False) -> dict[str, Any]:
    """Train in this process."""
    names: dict[str, Any] = {}
    exec(BUILT, names)
    names["losses"], names["norms"] = [], []
    for step in range(steps):
        x, y = map(torch.stack, zip(*names["data"][step % 4 * 8 :][:8], strict=True))
        loss = (names["model"](x) - y).pow(2).mean()
        names["optimizer"].zero_grad()
        loss.backward()
        gradients = [p.grad for p in names["model"].parameters()]
        names["losses"].append(loss.item())
        names["norms"].append(torch.sqrt(sum(g.pow(2).sum() for g in gradients)).item())
        names["optimizer"].step()
        if after:
            names["after"]()
    return names


# -- --after-step


@pytest.mark.parametrize("sharded", ["model", "both"])
def test_an_average_and_a_clamp_equal_one_process(session, sharded):
    names = ("model",) if sharded == "model" else ()
    session.model(BUILT, names, show=False)
    function = "after"
    if sharded == "model":  # its parameters are shards, the average's are whole
        session.run(
            "@torch.no_grad()\ndef whole():\n"
            "    for mine, theirs in zip(average.parameters(), model.parameters()):\n"
            "        mine.lerp_(fsdp.whole(theirs), 0.25)\n"
            "    for parameter in model.parameters():\n"
            "        parameter.clamp_(-0.3, 0.3)",
            show=False,
        )
        function = "whole"
    # read by the functions when they are called, not only while this cell is defined
    run = session.train(CELL, steps=6, after_step=function, **OPTIONS)
    alone = by_itself(after=True)
    assert run.losses == pytest.approx(alone["losses"], rel=1e-9)
    for kind in ("model", "average"):
        for name, ours in session.pull(f"dict({kind}.named_parameters())").items():
            theirs = alone[kind].get_parameter(name)
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-12)


def test_the_function_gets_the_steps_global_values(session):
    session.model(BUILT, show=False)
    cell = CELL + "metrics = {'rank': rank, 'late': 1.0} if step else {'rank': rank}"
    run = session.train(
        cell, steps=3, after_step="tell", eval_every=2, eval_data="data[:5]", **OPTIONS
    )
    alone = by_itself(steps=3)
    for told in session.pull("told", rank="all"):
        assert [values["step"] for values in told] == [0, 1, 2]
        assert [values["loss"] for values in told] == pytest.approx(alone["losses"], rel=1e-9)
        assert [values["grad_norm"] for values in told] == pytest.approx(alone["norms"], rel=1e-9)
        assert [values["rank"] for values in told] == [0.5, 0.5, 0.5]
        assert "late" not in told[0]
        assert "eval_loss" not in told[1]
        assert told[2]["eval_step"] == 2
        assert told[2]["eval_loss"] == run.evaluations[0].loss
        # of 5 samples in micro-batches of 4 rank 1 has one
        assert told[2]["eval_rank"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("lambda a, b: None", "takes (a, b); it is called without arguments, or with one"),
        ("lambda *, a: None", "takes (*, a); it is called without arguments, or with one"),
        ("5", "--after-step is a int; it takes a function of the engines"),
        ("nowhere", "nowhere"),
        ("1 +", "--after-step"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_first_step(session, function, words):
    session.model(BUILT, show=False)
    with pytest.raises(CellFailedError) as caught:
        session.train("told.append(1)\n" + CELL, steps=2, after_step=function, **OPTIONS)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert session.pull("told") == []


@pytest.mark.parametrize("function", ["lambda: told.append(0)", "lambda *a: told.append(len(a))"])
def test_a_function_without_arguments_gets_none(session, function):
    session.model(BUILT, show=False)
    session.train(CELL, steps=2, after_step=f"({function})", **OPTIONS)
    assert session.pull("told") == [0, 0]


def test_a_function_that_raises_on_one_rank_ends_the_run_after_that_step(session):
    session.model(BUILT, show=False)
    session.run(
        "def wrong(values):\n    if values['step'] == 2 and rank == 1:\n        1 / 0", show=False
    )
    with pytest.raises(CellFailedError, match="ZeroDivisionError") as caught:
        session.train(CELL, steps=6, after_step="wrong", **OPTIONS)
    assert caught.value.ranks == (1,)
    assert "in wrong" in str(caught.value)
    assert (caught.value.run.steps, caught.value.run.state) == (3, "failed")
    assert [status.steps for status in session.status(show=False)] == [3, 3]
    second = session.train(CELL, steps=3, **OPTIONS)
    assert caught.value.run.losses + second.losses == pytest.approx(by_itself()["losses"], rel=1e-9)


# -- fsdp.stop()

STOPS = {
    "cell": (CELL + "if step == 2 and rank == 1:\n    fsdp.stop()", {}),
    "function": (CELL, {"after_step": "halt"}),
}


@pytest.mark.parametrize("where", STOPS)
def test_stop_on_one_rank_ends_all_after_that_step(session, where):
    session.model(BUILT, show=False)
    session.run(
        "def halt(values):\n    if values['step'] == 2 and rank == 1:\n        fsdp.stop()",
        show=False,
    )
    cell, options = STOPS[where]
    run = session.train(cell, steps=6, **OPTIONS, **options)
    assert (run.state, run.steps, run.notes) == (
        "done",
        3,
        ["fsdp.stop() ended the run after 3 of 6 steps"],
    )
    second = session.train(CELL, steps=3, **OPTIONS)
    assert run.losses + second.losses == pytest.approx(by_itself()["losses"], rel=1e-9)


def test_stop_outside_a_run_is_refused(session):
    with pytest.raises(CellFailedError, match=r"fsdp.stop\(\) ends a training run"):
        session.run("fsdp.stop()", show=False)


# -- --log


def test_every_step_is_logged_in_order_and_evaluations_between(session):
    session.model(BUILT, show=False)
    logged: list[tuple[int, dict[str, float]]] = []
    run = session.train(
        CELL + "metrics = {'accuracy': 0.5}",
        steps=7, log=lambda values, step: logged.append((step, values)),
        eval_every=3, eval_data="data[:8]", **OPTIONS,
    )  # fmt: skip
    assert [step for step, _ in logged] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    evaluations = [values for _, values in logged if "eval_loss" in values]
    assert [values["eval_loss"] for values in evaluations] == [e.loss for e in run.evaluations]
    assert [values["eval_accuracy"] for values in evaluations] == [0.5, 0.5]
    steps = [values for _, values in logged if "loss" in values]
    assert [values["loss"] for values in steps] == run.losses
    assert [values["grad_norm"] for values in steps] == run.grad_norms
    assert all(values["accuracy"] == 0.5 for values in steps)


def test_a_second_run_logs_on(session):
    session.model(BUILT, show=False)
    logged: list[int] = []
    for _ in range(2):
        session.train(CELL, steps=2, log=lambda values, step: logged.append(step), **OPTIONS)
    assert logged == [0, 1, 2, 3]


@pytest.mark.parametrize("ending", ["interrupted", "failed"])
def test_steps_of_a_run_that_ends_early_are_logged_to_the_last(session, ending):
    session.model(BUILT, show=False)
    logged: list[int] = []
    options = OPTIONS | {"steps": 1000, "log": lambda values, step: logged.append(step)}
    if ending == "failed":
        with pytest.raises(CellFailedError) as caught:
            session.train(CELL + "if step == 5: 1 / 0", **options)
    else:
        with interrupted_after(), pytest.raises(CellInterrupted) as caught:
            session.train(CELL + stop_pressed("step == 20", then="time.sleep(0.5)"), **options)
    assert caught.value.run.steps > 0
    assert logged == list(range(caught.value.run.steps))


def test_a_log_that_raises_is_noted_and_the_run_goes_on(session):
    session.model(BUILT, show=False)
    called: list[int] = []

    def log(values: dict[str, float], step: int) -> None:
        called.append(step)
        if step == 2:
            raise OSError("no route to host")

    run = session.train(CELL, steps=6, log=log, **OPTIONS)
    assert (run.state, run.steps, called) == ("done", 6, [0, 1, 2])
    [note] = run.notes
    assert "--log raised OSError: no route to host; it was not called again after step 2" in note


def test_a_log_by_name_is_for_the_magic(session):
    with pytest.raises(UsageError, match="is not a function of the notebook"):
        session.train(CELL, log="wandb.log", show=False)


# -- metrics


def test_metrics_are_weighed_like_the_loss(session):
    session.model(BUILT, show=False)
    cell = (
        CELL + "loss_weight = 1 + rank\n"
        "metrics = {'mean': x.sum(), 'rank': rank, 'numpy': __import__('numpy').float32(rank)}\n"
        "if rank == 0: metrics['mine'] = torch.tensor([7.0])\n"
        "if step == 1: metrics['rare'] = True\n"
    )
    run = session.train(cell, steps=3, **OPTIONS)
    alone = by_itself(steps=0)
    for step in range(3):
        x = torch.stack([x for x, _ in alone["data"][step * 8 : step * 8 + 8]])
        expected = (x[:4].sum() + 2 * x[4:].sum()).item() / 3
        assert run.metrics["mean"][step] == pytest.approx(expected, rel=1e-9)
    assert run.metrics["rank"] == pytest.approx([2 / 3] * 3)
    assert run.metrics["numpy"] == pytest.approx([2 / 3] * 3)
    assert run.metrics["mine"] == [7.0] * 3
    assert [math.isnan(v) for v in run.metrics["rare"]] == [True, False, True]
    assert run.newest_metrics["rare"] == 1.0


def test_metrics_of_micro_steps_are_averaged_over_samples(session):
    session.model(BUILT, show=False)
    cell = CELL + "metrics = {'m': micro_step} if rank else {'m': 10.0, 'first': step}"
    run = session.train(cell, steps=2, accumulate=2, **OPTIONS)
    assert run.metrics == {"m": [5.25, 5.25], "first": [0.0, 1.0]}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_is_shown_with_its_step(session, rank):
    session.model(BUILT, show=False)
    session.train(CELL, steps=1, **OPTIONS)
    cell = CELL + f"if step == 2 and rank == {rank}: loss = loss * float('nan')"
    run = session.train(cell, steps=2, **OPTIONS)
    assert [math.isfinite(loss) for loss in run.losses] == [True, False]
    assert run.non_finite_steps == [2]
    assert "the loss of step 2 is not finite; --nan stop ends a run there" in run.last_frame[1]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_stopping_at_nan_leaves_the_weights_as_they_were(session, value):
    session.model(BUILT, show=False)
    session.run("kept = []", show=False)
    cell = (
        "kept.append({n: fsdp.whole(p).clone() for n, p in model.named_parameters()})\n"
        + CELL
        + f"if step == 3 and rank == 1: loss = loss * float('{value}')"
    )
    with pytest.raises(CellFailedError, match="the loss of step 3 is not finite") as caught:
        session.train(cell, steps=6, nan="stop", **OPTIONS)
    assert "\n" not in str(caught.value)
    assert caught.value.run.steps == 3
    for name, weight in session.pull("dict(model.named_parameters())").items():
        assert torch.equal(weight, session.pull(f"kept[3]['{name}']"))
    second = session.train(CELL, steps=3, **OPTIONS)
    assert caught.value.run.losses + second.losses == pytest.approx(by_itself()["losses"], rel=1e-9)


# -- numbers by name


def test_numbers_may_be_given_by_name(session):
    session.model(BUILT, show=False)
    session.run(
        "from types import SimpleNamespace\nimport numpy\n"
        "n_steps = 3\ncfg = SimpleNamespace(batch=numpy.int64(4), clip=torch.tensor(0.5))",
        show=False,
    )
    options = OPTIONS | {"steps": "n_steps", "micro_batch_size": "cfg.batch"}
    run = session.train(CELL, **options, max_grad_norm="cfg.clip * 2", eval_every="epoch",
                        eval_data="data")  # fmt: skip
    assert (run.steps, run.micro_batch_size) == (3, 4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("rank + 1", "--steps rank + 1 differs between the ranks (1, 2)"),
        ("nowhere", "--steps nowhere is no number on the engines (name 'nowhere' is not defined)"),
        ("model", "--steps model is a FSDPSequential on the engines; it must be a number"),
        ("data[0][0]", "--steps data[0][0] is a Tensor on the engines; it must be a number"),
        ("1.5 * 3", "--steps 4.5 cannot work; it takes a whole number from 1"),
        ("True or 1", "--steps True or 1 is a bool"),
        ("many steps", "--steps 'many steps' is not a whole number"),
    ],
)
def test_what_is_no_number_is_refused_in_one_line(session, value, words):
    session.model(BUILT, show=False)
    with pytest.raises(UsageError) as caught:
        session.train(CELL, **OPTIONS | {"steps": value})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert np.isfinite(session.train(CELL, steps=1, **OPTIONS).losses[0])
