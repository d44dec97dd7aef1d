"""A failure inside an optimizer's step is never silent: told, put back, or training is refused."""

from __future__ import annotations

from typing import Any

import pytest
from interrupting import interrupted_after, stop_pressed

from fsdp_magic.errors import CellFailedError, CellInterrupted, UsageError
from fsdp_magic.notebook.session import Session

BUILD = """
import torch
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.nn.Dropout(0.5))
first = torch.optim.AdamW(model[0].parameters(), lr=0.1)
second = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(first, 2, gamma=0.5)
data = list(torch.randn(48, 4))
class Batches:
    def __iter__(self):
        return iter(torch.randn(20, 3, 4).unbind())

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(80, 4).unbind())

again, stream = Batches(), Stream()
once = (batch for batch in torch.randn(20, 3, 4))
seen, breaking = [], None

def broken(*args):
    if breaking is not None and rank in breaking and step == 5:
        raise RuntimeError("broken optimizer")

second.register_step_pre_hook(broken)

def left():
    shards = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
    states = [v for o in (first, second) for s in o.state.values() for v in s.values()]
    states = [getattr(v, "to_local", lambda v=v: v)() for v in states]
    engine = __import__("builtins")._fsdp_magic_call.__self__
    return ([t.detach().tolist() for t in (*shards, *states)], scheduler.state_dict(),
            engine.randomness.state["torch"].tolist(), torch.get_rng_state().tolist(), engine.steps)
"""
CELL = "seen.append(batch.sum().item())\nloss = model(batch).pow(2).mean()"
OPTIONS: dict[str, Any] = {
    "data": "data", "micro_batch_size": 4, "scheduler_every": "step", "show": False,
}  # fmt: skip


def torn(session: Session, ranks: tuple[int, ...], **options: Any) -> CellFailedError:
    session.run(f"breaking = {ranks}", show=False)
    with pytest.raises(CellFailedError, match="broken optimizer") as caught:
        session.train(CELL, steps=8, **{**OPTIONS, **options})
    session.run("breaking = None", show=False)
    assert caught.value.is_torn
    assert caught.value.run.steps == 5
    assert "Nothing is lost" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_without_a_snapshot_training_is_refused_until_the_model_is_built_again(session, ranks):
    session.model(BUILD, show=False)
    error = torn(session, ranks)
    assert "optimizer step itself" in str(error)
    assert "Build the model again" in str(error)
    with pytest.raises(UsageError, match="--snapshot-every N"):
        session.train(CELL, steps=1, **OPTIONS)
    session.eval("loss = model(batch).pow(2).mean()", data="data", show=False)
    session.model(BUILD, show=False)
    assert session.train(CELL, steps=1, **OPTIONS).state == "done"


@pytest.mark.parametrize(
    ("data", "ranks", "strategy"),
    [
        ("data", (0,), "full_shard"),
        ("once", (0, 1), "zero1"),
        ("again", (1,), "ddp"),
        ("stream", (1,), "full_shard"),
    ],
)
def test_with_a_snapshot_every_rank_is_put_back_and_goes_on_exactly(session, data, ranks, strategy):
    options = {**OPTIONS, "data": data}
    if data in (
        "once",
        "again",
    ):  # an iterator that can be read once, and batches that are made anew
        options["micro_batch_size"] = None
    session.model(BUILD, strategy=strategy, show=False)
    reference = session.train(CELL, steps=8, **options)
    expected = session.pull("left(), seen", rank="all")
    session.run("del model, first, second, scheduler", show=False)
    session.run(RANDOM_AGAIN, show=False)
    session.model(BUILD, strategy=strategy, show=False)
    error = torn(session, ranks, snapshot_every=2, **options)
    assert str(error).endswith("every rank is back at the snapshot of step 4.")
    assert [status.steps for status in session.status(show=False)] == [4, 4]
    session.run("del seen[4:]", show=False)
    second = session.train(CELL, resume=True, **options)
    assert (second.first_step, second.steps) == (4, 4)
    assert error.run.losses[:4] + second.losses == reference.losses
    assert session.pull("left(), seen", rank="all") == expected
    with pytest.raises(UsageError, match="the last one took all its steps"):
        session.train(CELL, resume=True, **options)


RANDOM_AGAIN = """
from fsdp_magic.engine.randomness import TrainingRandomness, seed_all
engine = __import__("builtins")._fsdp_magic_call.__self__
engine._randomness = TrainingRandomness(engine.world.request.seed, rank)
seed_all(engine.world.request.seed)
"""


def test_a_manual_step_that_fails_on_all_ranks_keeps_what_had_stepped(session):
    session.model(BUILD, show=False)
    cell = "loss = model(batch).pow(2).mean()\nloss.backward()\nfirst.step()\n1 / 0"
    with pytest.raises(CellFailedError, match="those updates stay") as caught:
        session.train(cell, manual=True, data="data", micro_batch_size=4, show=False)
    assert not caught.value.is_torn
    assert session.train(CELL, steps=1, **OPTIONS).state == "done"


def test_a_manual_step_that_some_ranks_had_taken_is_torn(session):
    session.model(BUILD, show=False)
    cell = (
        "loss = model(batch).pow(2).mean()\nloss.backward()\n"
        "if rank == 1: raise ValueError('early')\n"
        "first.step()\nmodel(batch).sum().backward()"
    )
    with pytest.raises(CellFailedError, match="some ranks had stepped") as caught:
        session.train(cell, manual=True, data="data", micro_batch_size=4, show=False)
    assert caught.value.is_torn


UNLIKE_STEPS = {
    "first.step()\nif rank == 0: first.step()": (
        "the optimizer `first` has taken 2 steps on rank 0 and has taken 1 step on rank 1"
    ),
    "first.step()\nif rank == 1: second.step()": (
        "the optimizer `second` has taken 0 steps on rank 0 and has taken 1 step on rank 1"
    ),
    "breaking, step = ((0,), 5)\ntry: second.step()\nexcept RuntimeError: pass": (
        "the optimizer `second` has taken 1 step, the last not to its end, on rank 0 and has taken "
        "1 step on rank 1"
    ),
}


@pytest.mark.parametrize("steps", UNLIKE_STEPS)
def test_ranks_that_step_differently_in_a_manual_step_are_told(session, steps):
    session.model(BUILD, show=False)
    cell = f"loss = model(batch).pow(2).mean()\nloss.backward()\n{steps}"
    with pytest.raises(CellFailedError) as caught:
        session.train(cell, manual=True, data="data", micro_batch_size=4, show=False)
    assert UNLIKE_STEPS[steps] in str(caught.value)
    assert caught.value.is_torn


def test_an_error_in_a_cell_of_one_rank_after_a_run_tears_nothing(session):
    session.model(BUILD, show=False)
    session.train(CELL, steps=2, **OPTIONS)
    with pytest.raises(CellFailedError) as caught:
        session.run("1 / 0", ranks=0, show=False)
    assert not caught.value.is_torn
    assert session.train(CELL, steps=1, **OPTIONS).first_step == 2


def test_a_refused_call_and_an_optimizer_of_a_rank_alone_tear_nothing(session):
    session.model(BUILD, show=False)
    with pytest.raises(CellFailedError, match="steps every optimizer itself") as caught:
        session.train(CELL + "\nfirst.step()", steps=1, **OPTIONS)
    assert not caught.value.is_torn
    own = (
        "own = torch.nn.Linear(2, 2)\no = torch.optim.SGD(own.parameters(), lr=1.0)\n"
        "own(torch.ones(2)).sum().backward()\nif rank == 0: o.step()\n1 / 0"
    )
    with pytest.raises(CellFailedError) as caught:
        session.run(own, show=False)
    assert not caught.value.is_torn
    assert session.train(CELL, steps=1, **OPTIONS).state == "done"


def test_a_plain_cell_that_some_ranks_had_stepped_in_is_torn(session):
    session.model(BUILD, show=False)
    code = "model(data[0]).sum().backward()\nif rank == 1: 1 / 0\nfirst.step()"
    with pytest.raises(CellFailedError) as caught:
        session.run(code, show=False)
    assert caught.value.is_torn
    with pytest.raises(UsageError, match="a step was torn"):
        session.train(CELL, steps=1, **OPTIONS)


def test_a_torn_step_of_a_trial_is_put_back_with_the_rest(session):
    session.model(BUILD, show=False)
    weights = "[p.to_local().tolist() for p in model.parameters()]"
    before = session.pull(weights, rank="all")
    session.run("breaking = (1,)", show=False)
    with pytest.raises(CellFailedError) as caught:
        session.train(CELL, steps=8, trial=True, **OPTIONS)
    session.run("breaking = None", show=False)
    assert not caught.value.is_torn
    assert session.pull(weights, rank="all") == before
    assert session.train(CELL, steps=1, **OPTIONS).state == "done"


def test_an_interrupt_that_tears_a_step_says_so(session):
    session.model(BUILD, show=False)
    session.run("import time", show=False)
    cell = (
        "loss = model(batch).pow(2).mean()\nloss.backward()\n"
        f"if rank == 0: first.step()\n{stop_pressed('True', 0.4)}time.sleep(60)"
    )
    with interrupted_after(), pytest.raises(CellInterrupted, match="The step is torn"):
        session.train(cell, manual=True, data="data", micro_batch_size=4, show=False)
    with pytest.raises(UsageError, match="a step was torn"):
        session.train(CELL, steps=1, **OPTIONS)


def test_snapshots_do_not_hold_what_a_stream_yields_again(session):
    session.model(BUILD, show=False)
    session.run(
        "import weakref\nfrom torch.utils.data import IterableDataset\n"
        "class Counted(IterableDataset):\n"
        "    held = []\n"
        "    def __iter__(self):\n"
        "        for _ in range(200):\n"
        "            sample = torch.randn(4)\n"
        "            self.held.append(weakref.ref(sample))\n"
        "            yield sample\n"
        "stream = Counted()",
        show=False,
    )
    options = {**OPTIONS, "data": "stream", "micro_batch_size": 2}
    session.train(CELL, steps=30, snapshot_every=40, **options)
    held = "sum(sample() is not None for sample in stream.held)"
    assert max(session.pull(held, rank="all")) <= 8


def snapshotted(session: Session, code: str = "", **options: Any) -> None:
    """Train two steps, each with a snapshot."""
    session.model(BUILD + code, "model", strategy="shard_grad_op", show=False)
    session.train(CELL, steps=2, snapshot_every=1, **OPTIONS, **options)


def torn_by_a_cell(session: Session) -> CellFailedError:
    code = "model(data[0]).sum().backward()\nif rank == 1: 1 / 0\nsecond.step()"
    with pytest.raises(CellFailedError) as caught:
        session.run(code, show=False)
    assert caught.value.is_torn
    return caught.value


def test_a_snapshot_puts_back_what_cells_have_changed_since(session):
    own = (
        "mean = torch.nn.Linear(2, 1)\n"
        "def look():  # which leaves parameters gathered\n"
        "    with torch.enable_grad(): model(data[0])\n"
    )
    snapshotted(session, own, after_step="look")
    there = "left(), mean.weight.tolist(), [m.training for m in (*model, mean)]"
    expected = session.pull(there, rank="all")
    session.run(
        "torch.rand(3), model[2].eval(), mean.eval()\nwith torch.no_grad(): mean.weight.add_(1)",
        show=False,
    )
    assert session.pull(there, rank="all") != expected
    assert "back at the snapshot of step 2" in str(torn_by_a_cell(session))
    assert session.pull(there, rank="all") == expected


def test_a_step_torn_before_the_first_snapshot_was_due_goes_back_to_the_beginning(session):
    session.model(BUILD, show=False)
    there = "[p.to_local().tolist() for p in model.parameters()], len(first.state)"
    before = session.pull(there, rank="all")
    session.train(CELL, steps=2, snapshot_every=9, **OPTIONS)
    assert "back at the snapshot of step 0" in str(torn_by_a_cell(session))
    assert session.pull(there, rank="all") == before


def test_a_snapshot_that_does_not_fit_one_rank_is_loaded_by_none(session):
    snapshotted(session)
    session.run("if rank == 1: del first", show=False)
    told = str(torn_by_a_cell(session))
    assert "(the snapshot of step 2 does not fit: first is another one now)" in told
    with pytest.raises(UsageError, match="a step was torn"):
        session.train(CELL, steps=1, **OPTIONS)


def test_an_optimizer_that_holds_no_shard_tears_a_step_of_its_run(session):
    whole = (
        "extra = torch.nn.Parameter(torch.ones(3))\n"
        "third = torch.optim.SGD([extra], lr=0.1)\n"
        "def refuse(*args): raise RuntimeError('broken optimizer')\n"
        "third.register_step_pre_hook(refuse)\n"
    )
    session.model(BUILD + whole, "model", show=False)
    with pytest.raises(CellFailedError, match="broken optimizer") as caught:
        session.train(CELL + " + extra.sum()", steps=1, **OPTIONS)
    assert caught.value.is_torn
