"""Snapshots: what a lost engine had is put into the models that the same cells build again."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from clean_engines import FRESH_NAMES
from test_torn_steps import BUILD, RANDOM_AGAIN
from test_torn_steps import CELL as PLAIN
from test_torn_steps import OPTIONS as PLAIN_OPTIONS

from fsdp_magic.errors import CellFailedError, EngineDiedError, UsageError
from fsdp_magic.notebook.session import Session

DATA = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

torch.set_default_dtype(torch.float64)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(40, 4))

samples = list(torch.randn(52, 4, generator=torch.Generator().manual_seed(3)))
loader = DataLoader(samples, batch_size=2, shuffle=True, num_workers=2)
stream = Stream()
seen = []
"""
MODEL = """
class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5))
        self.last = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(self.layers(x)) * self.scale

model = Net()
mean = nn.Linear(4, 1)
groups = [{"params": model.layers.parameters(), "lr": 0.02},
          {"params": [*model.last.parameters(), model.scale]}]
optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
"""
CRITIC = "critic = nn.Linear(4, 1)"
OPTIMIZER = """
extra = nn.Parameter(torch.ones(3))
later = torch.optim.SGD([extra, *critic.parameters()], lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)

def average():
    with torch.no_grad():
        for p in mean.parameters():
            p.mul_(0.9).add_(extra.mean())
"""
CELL = """
x, y = batch
seen.append((x.sum() + y.sum()).item())
loss = (model(x) - y.mean()).pow(2).mean() + (extra ** 2).sum() / 10
loss = loss + (critic(x) + 1).pow(2).mean()
KILL
"""
LEFT = """
def left():
    modules = [*model.parameters(), *critic.parameters(), *mean.parameters()]
    tensors = [*modules, *model.buffers(), extra]
    tensors += [v for o in (optimizer, later) for s in o.state.values() for v in s.values()]
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    engine = __import__("builtins")._fsdp_magic_call.__self__
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return ([t.detach().tolist() for t in tensors], groups, scheduler.state_dict(),
            engine.randomness.state["torch"].tolist(), torch.get_rng_state().tolist(), engine.steps)
"""
DRAWN = "torch.rand(7)\n"  # which nobody draws again on new engines
KILL = "if step == 7 and rank == 1:\n    import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
OPTIONS: dict[str, Any] = {
    "data": "loader,stream", "micro_batch_size": 2, "after_step": "average", "show": False,
}  # fmt: skip


@pytest.fixture
def fresh(session: Session) -> Iterator[Session]:
    """A session whose engines may be lost."""
    yield session
    if not session.alive:
        session.restart()
    session.restart()  # the names of a fresh engine were not looked at while they were fresh
    session.run(FRESH_NAMES, show=False)


def build(session: Session, *, show: bool = False) -> None:
    session.model(MODEL, "model", show=show)
    session.model(CRITIC, "critic", show=show)


def test_a_run_whose_engine_died_goes_on_from_its_snapshot_exactly(fresh, capsys):
    session = fresh
    session.run(DATA, show=False)
    build(session)
    session.run(OPTIMIZER + LEFT + DRAWN, show=False)
    reference = session.train(CELL.replace("KILL", ""), steps=10, **OPTIONS)
    expected = session.pull("left(), seen[-4:]", rank="all")

    session.run("del model, critic, optimizer, later, scheduler, loader, stream", show=False)
    session.run(RANDOM_AGAIN, show=False)
    session.run(DATA, show=False)
    build(session)
    session.run(OPTIMIZER + DRAWN, show=False)
    with pytest.raises(EngineDiedError) as caught:
        session.train(CELL.replace("KILL", KILL), steps=10, snapshot_every=3, **OPTIONS)
    assert caught.value.run.total_steps == 10

    session.restart()
    assert session.restarted.endswith(
        "building `model`, `critic` again in %%fsdp_model loads the snapshot of step 6, and "
        "%%fsdp_train --resume goes on from there"
    )
    session.run(FRESH_NAMES, show=False)
    session.run(DATA, show=False)
    session.model(MODEL.replace("width=6", "width=5"), "model")  # not that model: it is kept
    said = capsys.readouterr().out
    assert re.search(r"the snapshot of step 6 was not loaded: model\.\S+ is \(5, 4\) float64", said)
    session.run(RANDOM_AGAIN, show=False)
    build(session, show=True)
    said = capsys.readouterr().out
    told = "the snapshot of step 6 was loaded: the next step is 6, and %%fsdp_train --resume takes"
    assert said.count(f"{told} the other 4; run the cell again to start at 0 instead") == 2
    assert "stream is read in its own order" in said
    session.run(OPTIMIZER + LEFT, show=False)
    second = session.train(CELL.replace("KILL", ""), resume=True, **OPTIONS)
    assert (second.first_step, second.steps) == (6, 4)
    assert second.notes[:-1] == reference.notes
    assert second.notes[-1].startswith("a snapshot every 3 steps takes"), "it is as safe as before"
    assert second.losses == reference.losses[6:]
    assert second.grad_norms == reference.grad_norms[6:]
    assert session.pull("left(), seen[-4:]", rank="all") == expected


def test_a_step_torn_before_the_next_snapshot_goes_back_in_the_data_on_every_rank(fresh):
    """One rank has made the snapshot itself, and the other has a fresh engine."""
    session = fresh
    session.model(BUILD, show=False)
    kill = "\nif step == 3 and rank == 1:\n    import os; os.kill(os.getpid(), 9)"
    with pytest.raises(EngineDiedError):
        session.train(PLAIN + kill, steps=8, snapshot_every=2, **PLAIN_OPTIONS)
    session.restart()
    session.run(FRESH_NAMES, show=False)
    session.model(BUILD, show=False)
    session.run("breaking, other = (0,), data[:16]", show=False)
    session.train(PLAIN, steps=1, **{**PLAIN_OPTIONS, "data": "other"})
    with pytest.raises(CellFailedError, match="back at the snapshot of step 2"):
        session.train(PLAIN, steps=8, **PLAIN_OPTIONS)
    session.run("breaking = None", show=False)
    session.train(PLAIN, steps=1, **PLAIN_OPTIONS)
    places = "[(c.place.epoch, c.place.consumed) for c in POSITION._cursors]".replace(
        "POSITION", "__import__('builtins')._fsdp_magic_call.__self__.position"
    )
    assert session.pull(places, rank="all") == [[(0, 0), (0, 24)]] * 2


def test_a_snapshot_says_its_size_and_is_forgotten_with_its_model(session):
    session.run(DATA, show=False)
    build(session)
    session.run(OPTIMIZER, show=False)
    run = session.train(CELL.replace("KILL", ""), steps=3, snapshot_every=2, **OPTIONS)
    (note,) = [note for note in run.notes if "snapshot" in note]
    assert re.fullmatch(
        r"a snapshot every 2 steps takes [\d.]+ KiB of host memory a rank, twice", note
    )
    assert session._snapshots.used_bytes > 0
    build(session)
    assert session._snapshots.used_bytes == 0
    assert session.pull("[f.number for f in SNAPSHOTS._files]".replace(
        "SNAPSHOTS", "__import__('builtins')._fsdp_magic_call.__self__.snapshots"
    ), rank="all") == [[0, 0]] * 2  # fmt: skip


def test_a_full_memory_costs_one_note_and_the_older_snapshot_stays(session):
    session.run(DATA, show=False)
    build(session)
    session.run(OPTIMIZER, show=False)
    cell = (
        "import resource\n"
        "if step == 2 and rank == 1:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
    )
    try:
        run = session.train(cell + CELL.replace("KILL", ""), steps=5, snapshot_every=1, **OPTIONS)
    finally:
        session.run(
            "import resource\nno = resource.RLIM_INFINITY\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (no, no))",
            show=False,
        )
    session.run(
        "def broken(*args):\n    raise RuntimeError('broken optimizer')\n"
        "optimizer.register_step_pre_hook(broken)",
        show=False,
    )
    with pytest.raises(CellFailedError, match="back at the snapshot of step 2"):
        session.train(CELL.replace("KILL", ""), steps=1, **OPTIONS)
    notes = [note for note in run.notes if "was not made" in note]
    assert len(notes) == 1
    assert notes[0].startswith("the snapshot of step 3 was not made (")
    assert notes[0].endswith("; the one of step 2 stays")
    assert session.status(show=False)[0].steps == 2


def test_options_that_contradict_snapshots_are_refused(session):
    with pytest.raises(UsageError, match="--trial puts everything back"):
        session.train("pass", trial=True, snapshot_every=2)
    with pytest.raises(UsageError, match="--snapshot-every 0"):
        session.train("pass", snapshot_every=0)


def test_no_file_of_a_session_that_ended_is_left():
    from fsdp_magic.notebook.snapshot_files import SnapshotFiles

    gc.collect()  # what earlier tests left
    before = set(os.listdir("/proc/self/fd"))
    files = SnapshotFiles(3)
    assert all(os.path.exists(path) for path in files.paths(2))
    files.close()
    files.close()
    assert files.paths(2) == ()
    assert set(os.listdir("/proc/self/fd")) == before
