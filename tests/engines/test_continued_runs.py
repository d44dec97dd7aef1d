"""A second run continues the first, a resumed one finishes it, and a trial leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interrupting import interrupted_after, stop_pressed

from fsdp_magic.errors import CellFailedError, CellInterrupted, UsageError

BUILT = """
import random, time
import numpy
import torch
import torch.nn as nn
from fsdp_magic.engine.randomness import TrainingRandomness

torch.manual_seed(1)
model = nn.Sequential(
    nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 3)
).double()
optimizer = torch.optim.OPTIMIZER
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9 ** n)
generator = torch.Generator().manual_seed(2)
data = list(zip(
    torch.randn(32, 6, generator=generator, dtype=torch.float64),
    torch.randn(32, 3, generator=generator, dtype=torch.float64),
))
seen = []
import builtins
builtins._fsdp_magic_call.__self__._randomness = TrainingRandomness(0, rank)  # as if just started
"""
SGD = BUILT.replace("OPTIMIZER", "SGD(model.parameters(), lr=0.1, momentum=0.9)")
ADAMW = BUILT.replace("OPTIMIZER", "AdamW(model.parameters(), lr=0.01)")
CELL = """
seen.append((step, epoch, total_steps))
x, y = batch
noise = random.random() + numpy.random.rand()
loss = (model(x) - y).pow(2).mean() * (1 + 0.1 * noise)
"""
OPTIONS = {"data": "data", "micro_batch_size": 4, "show": False}
"""Steps of eight samples: an epoch is four steps."""


def weights(session: Any) -> dict[str, torch.Tensor]:
    return session.pull("dict(model.state_dict())")


def whole_run(session: Any, built: str = SGD, *, steps: int = 6) -> tuple[Any, Any]:
    """Train in one run, and return its losses and what became of the weights."""
    session.model(built, show=False)
    return session.train(CELL, steps=steps, **OPTIONS).losses, weights(session)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("cuts", [(3, 3), (1, 5), (4, 2)])
@pytest.mark.parametrize("built", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_two_runs_are_one(session, built, cuts):
    """With momentum, a scheduler, dropout, draws, shuffled data and an epoch crossed."""
    losses, after = whole_run(session, built)
    session.model(built, show=False)
    parts = [session.train(CELL, steps=steps, **OPTIONS).losses for steps in cuts]
    assert parts[0] + parts[1] == losses
    assert same(weights(session), after)


def test_names_count_over_runs(session):
    session.model(SGD, show=False)
    for steps in (3, 3):
        session.train(CELL, steps=steps, **OPTIONS)
    assert session.pull("seen") == [(s, s // 4, 3 if s < 3 else 6) for s in range(6)]


def test_a_new_model_starts_at_zero(session):
    for _ in range(2):
        session.model(SGD, show=False)
        session.train(CELL, steps=2, **OPTIONS)
        assert session.pull("seen") == [(0, 0, 2), (1, 0, 2)]


# -- resuming


def cut_short(session: Any, how: str, *, at: int = 2, **options: Any) -> Any:
    """Train, be cut short in one of three ways, and return the run."""
    if how == "an interrupt":
        press = stop_pressed(f"step == {at}", then="time.sleep(0.5)")  # for the kernel to hear it
        with interrupted_after(), pytest.raises(CellInterrupted) as stopped:
            session.train(press + CELL, **OPTIONS, **options)
        return stopped.value.run
    end = {  # after the forward, which has moved running statistics
        "a failure": f"if step == {at} and rank == 1 and not again:\n    1 / 0\n",
        "a timeout": f"if step == {at} and rank == 1 and not again:\n    time.sleep(60)\n",
    }[how]
    session.run("again = False", show=False)
    timeout = {"timeout": 1.0} if how == "a timeout" else {}
    with pytest.raises(CellFailedError) as failed:
        session.train(CELL + end, **OPTIONS, **options, **timeout)
    session.run("again = True", show=False)
    return failed.value.run


@pytest.mark.parametrize("how", ["an interrupt", "a failure", "a timeout"])
@pytest.mark.parametrize("length", [{"steps": 8}, {"epochs": 2}])
def test_resume_finishes_what_was_cut_short(session, how, length):
    losses, after = whole_run(session, steps=8)
    session.model(SGD, show=False)
    first = cut_short(session, how, **length)
    assert 0 < first.steps < 8
    second = session.train(CELL, resume=True, **OPTIONS, **length)
    assert (second.state, second.first_step) == ("done", first.steps)
    assert first.losses + second.losses == losses
    assert same(weights(session), after)
    assert {total for *_, total in session.pull("seen")} == {8}


def test_resume_needs_no_length(session):
    session.model(SGD, show=False)
    first = cut_short(session, "a failure", steps=6)
    second = session.train(CELL, resume=True, **OPTIONS)
    assert first.steps + second.steps == 6


def test_resume_takes_what_was_left_and_no_other_length(session):
    session.model(SGD, show=False)
    cut_short(session, "a failure", steps=6)
    for other in ({"steps": 3}, {"epochs": 1}):
        with pytest.raises(UsageError, match="takes the 4 steps that the last run had left"):
            session.train(CELL, resume=True, **OPTIONS, **other)
    assert session.train(CELL, resume=True, steps=6, **OPTIONS).steps == 4


def test_an_error_says_which_weights_are_left_and_how_to_go_on(session):
    session.model(SGD, show=False)
    session.train(CELL, steps=3, **OPTIONS)
    fails = "if step == 5:\n    1 / 0\n"
    with pytest.raises(CellFailedError) as failed:
        session.train(CELL + fails, steps=6, **OPTIONS)
    last = "Nothing is lost: the weights are those after step 5; --resume takes the other 4."
    assert str(failed.value).splitlines()[-1] == last
    assert failed.value._render_traceback_()[-1] == last
    with pytest.raises(CellFailedError, match="loss") as refused:
        session.train("x = 1", steps=6, **OPTIONS)
    assert len(str(refused.value).splitlines()) == 1
    with interrupted_after(0.5), pytest.raises(CellInterrupted) as stopped:
        session.train("time.sleep(0.15)\n" + CELL, steps=50, **OPTIONS)
    done = stopped.value.run.steps
    step = f"Training stopped after step {5 + done}; --resume takes the other {50 - done}."
    assert str(stopped.value) == step


def test_resume_twice_in_a_row(session):
    losses, after = whole_run(session, steps=14)
    session.model(SGD, show=False)
    parts = [cut_short(session, "a failure", steps=14)]
    parts.append(cut_short(session, "a failure", at=8, resume=True))
    parts.append(session.train(CELL, resume=True, **OPTIONS))
    assert [part.steps for part in parts] == [2, 6, 6]
    assert [loss for part in parts for loss in part.losses] == losses
    assert same(weights(session), after)


def test_resume_of_a_stream_goes_to_the_end_of_its_epochs(session):
    session.model(
        SGD + "class Stream(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter(data)\n"
        "stream = Stream()\nagain = False",
        show=False,
    )
    options = OPTIONS | {"data": "stream", "epochs": 3}
    with pytest.raises(CellFailedError) as failed:
        session.train("if step == 5 and not again:\n    1 / 0\n" + CELL, **options)
    assert failed.value.run.steps == 5
    second = session.train(CELL, resume=True, **options)
    assert second.steps == 7
    assert [(step, epoch) for step, epoch, _ in session.pull("seen")][-1] == (11, 2)


def test_a_refused_run_between_does_not_hide_what_is_left(session):
    session.model(SGD, show=False)
    cut_short(session, "a failure", steps=6)
    with pytest.raises(CellFailedError):
        session.train("await x", steps=3, **OPTIONS)
    with pytest.raises(CellFailedError):
        session.train(CELL, resume=True, **OPTIONS | {"data": "nowhere"})
    assert session.train(CELL, resume=True, **OPTIONS).steps == 4


def refused(session: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        session.train(CELL, resume=True, **OPTIONS | options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_resume_with_nothing_to_finish_is_refused(session):
    session.model(SGD, show=False)
    assert "none has begun with this model" in refused(session)
    session.train(CELL, steps=2, **OPTIONS)
    assert "the last one took all its steps; leave --resume out" in refused(session)
    cut_short(session, "a failure", steps=8)
    session.model(SGD, show=False)
    assert "none has begun with this model" in refused(session)


def test_a_model_left_alone_can_be_resumed(session):
    session.model(SGD, show=False)
    cut_short(session, "a failure", steps=6)
    session.model("model = model", show=False)
    assert session.train(CELL, resume=True, **OPTIONS).steps == 4


def test_a_timeout_names_itself_and_keeps_the_steps(session):
    session.model(SGD, show=False)
    with pytest.raises(CellFailedError, match="--timeout") as caught:
        session.train("if step == 2:\n    time.sleep(60)\n" + CELL, steps=9, timeout=1.0, **OPTIONS)
    assert (caught.value.run.state, caught.value.run.steps) == ("failed", 2)
    assert "--timeout" in caught.value.run.message


# -- trials

STATE = """
dict(
    weights={n: t.clone() for n, t in model.state_dict().items()},
    modes=[m.training for m in model.modules()],
    gradients=[p.grad for p in model.parameters()],
    groups=[{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    state=[optimizer.state.get(p) for g in optimizer.param_groups for p in g["params"]],
    scheduler={k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"},
    draws=(torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),
    training=builtins._fsdp_magic_call.__self__.randomness.state,
    steps=builtins._fsdp_magic_call.__self__.steps,
)
"""
TRIALS = ["done", "fails", "is interrupted", "is refused", "stops itself", "is manual"]


def try_out(session: Any, how: str) -> None:
    options = OPTIONS | {"steps": 5, "trial": True}
    changed = "model.eval()\nmodel[1].running_mean = torch.zeros(16).double()\n" + CELL
    match how:
        case "done":
            assert session.train(changed, **options).steps == 5
        case "fails":
            with pytest.raises(CellFailedError):
                session.train(changed + "if step % 3 == 2 and rank: 1 / 0", **options)
        case "is interrupted":
            press = stop_pressed("step % 3 == 2", then="time.sleep(0.5)")
            with interrupted_after(), pytest.raises(CellInterrupted):
                session.train(press + changed, **options)
        case "is refused":
            with pytest.raises(CellFailedError, match="nowhere"):
                session.train(changed, **options, after_step="nowhere")
        case "stops itself":
            assert session.train(changed + "fsdp.stop()", **options).steps == 1
        case "is manual":
            manual = "\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()\nscheduler.step()"
            assert session.train(changed + manual, **options, manual=True).steps == 5


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs) if not hasattr(ours, "shape") else bool((ours == theirs).all())


@pytest.mark.parametrize("how", TRIALS)
@pytest.mark.parametrize("trained", [0, 3])
def test_a_trial_leaves_everything_as_it_was(session, how, trained):
    session.model(ADAMW + "model[4].eval()", show=False)
    if trained:
        session.train(CELL, steps=trained, **OPTIONS)
    session.run("torch.rand(1), random.random(), numpy.random.rand()", show=False)
    before = session.pull(STATE, rank="all")
    try_out(session, how)
    after = session.pull(STATE, rank="all")
    for rank in range(2):
        for name, value in before[rank].items():
            assert equal(value, after[rank][name]), f"{name} of rank {rank}"


@pytest.mark.parametrize("how", TRIALS)
def test_after_a_trial_training_goes_on_as_if_it_had_not_been(session, how):
    losses, after = whole_run(session, ADAMW)
    session.model(ADAMW, show=False)
    first = session.train(CELL, steps=2, **OPTIONS).losses
    try_out(session, how)
    second = session.train(CELL, steps=4, **OPTIONS).losses
    assert first + second == losses
    assert same(weights(session), after)


@pytest.mark.parametrize("source", ["iter(batches)", "(b for b in batches)", "map(tuple, batches)"])
def test_a_trial_gives_back_what_it_took_of_an_iterator(session, source):
    built = SGD + (
        "batches = [tuple(map(torch.stack, zip(*data[i * 4:i * 4 + 4]))) for i in range(8)]\n"
        f"source = {source}"
    )
    options = {"data": "source", "show": False}
    session.model(built, show=False)
    losses = session.train(CELL, steps=6, **options).losses
    session.model(built, show=False)
    first = session.train(CELL, steps=2, **options).losses
    session.train(CELL, steps=3, trial=True, **options)
    assert first + session.train(CELL, steps=4, **options).losses == losses


def test_a_trial_is_not_what_resume_finishes(session):
    session.model(SGD, show=False)
    cut_short(session, "a failure", steps=6)
    try_out(session, "is interrupted")
    assert session.train(CELL, resume=True, **OPTIONS).steps == 4


def test_a_trial_is_a_run_like_others(session):
    session.model(SGD, show=False)
    run = session.train(CELL, steps=2, trial=True, **OPTIONS)
    assert (run.state, len(run.losses), session.runs[-1]) == ("done", 2, run)
    assert session.status(show=False)[0].steps == 0
