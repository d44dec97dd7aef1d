"""After engines were lost: whose snapshot is loaded into what, and what a person is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from clean_engines import FRESH_NAMES

from fsdp_magic.errors import CellFailedError, EngineDiedError, UsageError
from fsdp_magic.notebook.session import Session

MODEL = """
import os, torch
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
LOSS = "loss = model(torch.ones(2, 3)).square().mean()\n"
DIES = "if step == 7 and rank in DEAD: os.kill(os.getpid(), 9)\n"
STATE = "[tuple(s['exp_avg'].shape) for s in optimizer.state.values()]"
GONE = (
    "`model` is gone since %fsdp_restart; build it again in %%fsdp_model, which loads the "
    "snapshot, then %%fsdp_train --resume"
)


@pytest.fixture
def fresh(session: Session) -> Iterator[Session]:
    """A session whose engines may be lost."""
    yield session
    session.restart()  # the names of a fresh engine were not looked at while they were fresh
    session.run(FRESH_NAMES, show=False)


def lose(session: Session, *, dead: str = "[1]", every: int | None = 3) -> str:
    """Train until engines die, replace them, and return what was told of the death."""
    with pytest.raises(EngineDiedError) as caught:
        session.train(LOSS + DIES.replace("DEAD", dead), steps=10, snapshot_every=every, show=False)
    deadline = time.monotonic() + 2
    while len(session.engines.lost) < len(dead.split(",")) and time.monotonic() < deadline:
        time.sleep(0.01)  # two do not end in the same moment
    session.restart()
    return str(caught.value)


def build(session: Session, capsys: pytest.CaptureFixture[str], code: str = MODEL) -> str:
    """Build a model and return the lines that tell of snapshots."""
    capsys.readouterr()
    session.model(code)
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line for line in lines if "snapshot" in line)


def test_a_death_tells_what_is_lost_and_a_training_cell_what_to_build(fresh, capsys):
    build(fresh, capsys)
    told = lose(fresh).splitlines()[1]
    assert told == (
        "`model` is lost, and the snapshot of step 6 is safe: %fsdp_restart, then the cells "
        "that build it, then %%fsdp_train --resume"
    )
    for resume in (False, True):
        with pytest.raises((CellFailedError, UsageError)) as caught:
            fresh.train(LOSS, resume=resume, show=False)
        assert str(caught.value) == GONE
    assert "step 6 was loaded" in build(fresh, capsys)

    with pytest.raises(EngineDiedError, match="the snapshot of step 6 is safe"):
        fresh.run("if rank == 1: os.kill(os.getpid(), 9)", show=False)
    fresh.restart()
    assert "step 6 was loaded" in build(fresh, capsys), "no run began since it was loaded"

    fresh.run("model", show=False)
    lose(fresh, dead="[0, 1]")
    assert fresh.restarted == (
        "every rank has a fresh engine; building `model` again in %%fsdp_model loads the snapshot "
        "of step 6, and %%fsdp_train --resume goes on from there"
    )
    for refused in (
        lambda: fresh.train(LOSS, resume=True, show=False),
        lambda: fresh.train(LOSS, show=False),
        lambda: fresh.run("model", show=False),
    ):
        with pytest.raises((CellFailedError, UsageError)) as caught:
            refused()
        assert str(caught.value) == GONE


def test_the_same_cell_again_starts_at_0_and_the_snapshot_is_gone(fresh, capsys):
    build(fresh, capsys)
    lose(fresh)
    assert "step 6 was loaded" in build(fresh, capsys)
    assert build(fresh, capsys) == "the next step is 0; the snapshot of step 6 is forgotten"
    assert fresh._snapshots.used_bytes == 0
    assert fresh.status(show=False)[0].steps == 0
    assert fresh.pull("len(optimizer.state)") == 0
    assert build(fresh, capsys) == ""


def test_a_restart_that_nothing_called_for_forgets_snapshots(fresh, capsys):
    build(fresh, capsys)
    lose(fresh)
    build(fresh, capsys)
    assert fresh.train(LOSS, resume=True, show=False).steps == 4
    assert build(fresh, capsys) == "", "it was taken up once"
    fresh.train(LOSS, steps=3, snapshot_every=1, show=False)
    assert fresh._snapshots.used_bytes > 0
    fresh.restart()
    assert fresh._snapshots.used_bytes == 0
    assert build(fresh, capsys) == ""


def test_of_a_snapshot_that_was_not_loaded_nothing_reaches_the_next_run(fresh, capsys):
    build(fresh, capsys)
    lose(fresh)
    assert "step 6 was loaded" in build(fresh, capsys)
    assert "was not loaded: model.weight is (5, 3)" in build(
        fresh, capsys, MODEL.replace("3, 4", "3, 5")
    )
    assert fresh.train(LOSS, steps=2, show=False).state == "done"
    shapes = fresh.run(STATE, show=False)[0].result
    assert shapes == "[(5, 3), (5,)]"
    assert "step 6 was loaded" in build(fresh, capsys), "it waits for the model that fits"
    run = fresh.train(LOSS, resume=True, show=False)
    assert (run.first_step, run.steps) == (6, 4)


def test_hyperparameters_are_those_of_the_snapshot_and_it_says_so(fresh, capsys):
    build(fresh, capsys)
    lose(fresh)
    edited = MODEL.replace("lr=0.01", "lr=0.5, betas=(0.8, 0.999)")
    assert "step 6 was loaded" in build(fresh, capsys, edited.replace("optimizer =", "other ="))
    fresh.run("optimizer = other\ndel other", show=False)  # made after the model
    notes = fresh.train(LOSS, steps=1, snapshot_every=3, show=False).notes
    assert notes[:2] == [
        "lr of `optimizer` is 0.01 as in the snapshot; the cell says 0.5",
        "betas of `optimizer` is (0.9, 0.999) as in the snapshot; the cell says (0.8, 0.999)",
    ]
    assert fresh.run("optimizer.param_groups[0]['lr']", show=False)[0].result == "0.01"


def test_the_state_of_another_optimizer_is_left_fresh_and_it_says_so(fresh, capsys):
    build(fresh, capsys)
    lose(fresh)
    capsys.readouterr()
    fresh.model(MODEL.replace("AdamW", "SGD"))
    note = "`optimizer` is SGD now and was AdamW in the snapshot: its state starts anew"
    assert note in capsys.readouterr().out
    assert fresh.pull("len(optimizer.state), optimizer.param_groups[0]['lr']") == (0, 0.01)
    run = fresh.train(LOSS, resume=True, show=False)
    assert (run.first_step, run.steps) == (6, 4)
    assert not [note for note in run.notes if "not put back" in note]


def test_without_a_snapshot_a_death_says_what_would_have_kept_the_model(fresh, capsys):
    build(fresh, capsys)
    told = lose(fresh, every=None).splitlines()[1]
    assert told.startswith(
        "`model` is lost: build it again after %fsdp_restart (%%fsdp_train --snapsh"
    )
    assert fresh.restarted.endswith("; build `model` again in %%fsdp_model")
    with pytest.raises(UsageError, match="leave --resume out: there is no snapshot"):
        fresh.train(LOSS, resume=True, show=False)


def test_an_engine_that_is_killed_between_cells_has_no_last_words_of_an_older_cell(fresh):
    fresh.run("import os\nif rank == 1: os.write(2, b'an old complaint\\n')", show=False)
    fresh.run("1", show=False)
    pid = fresh.status(show=False)[1].pid
    os.kill(pid, signal.SIGKILL)  # not in a cell: that may be told of it before it has ended
    with pytest.raises(EngineDiedError) as caught:
        fresh.run("1", show=False)
    assert "an old complaint" not in str(caught.value)
