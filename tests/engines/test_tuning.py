"""F26, F27: a search ends, raises what is wrong at once, and leaves everything as before."""

from __future__ import annotations

from typing import Any

import pytest
from as_before import BUILT, CELL, assert_as_before, note

from fsdp_magic.errors import CellFailedError, FsdpError, UsageError
from fsdp_magic.notebook.session import Session
from fsdp_magic.notebook.tuned import Tuned

OPTIONS = {"data": "data", "scheduler_every": "step", "show": False}
COUNTED = f"tried.append((micro_batch_size, len(batch)))\n{CELL}"


def trained(session: Session, cell: str = CELL, *, built: str = BUILT, **options: Any) -> Any:
    """Build and train, note everything, and return the losses that come next."""
    session.run("tried = []", show=False)
    strategy = options.pop("strategy", "full_shard")
    session.model(built, names=["model", "teacher"], strategy=strategy, show=False)
    options = {**OPTIONS, "micro_batch_size": 5, **options}
    session.train(cell, steps=3, **options)
    comes = session.train(cell, steps=6, trial=True, **options).losses
    session.run("tried.clear()", show=False)
    note(session)
    return comes


def trains_on(session: Session, cell: str = CELL, **options: Any) -> list[float]:
    options = {**OPTIONS, "micro_batch_size": 5, **options}
    return session.train(cell, steps=6, **options).losses


def sizes(tuned: Tuned) -> list[int]:
    return [probe.micro_batch_size for probe in tuned.probes]


@pytest.mark.parametrize(
    "strategy",
    [
        "zero1",
        *(
            pytest.param(s, marks=pytest.mark.nightly)
            for s in ("full_shard", "ddp", "shard_grad_op")
        ),
    ],
)
def test_sizes_double_and_all_is_as_before(session, strategy) -> None:
    comes = trained(session, COUNTED, strategy=strategy)
    tuned = session.tune(objective="throughput", max=12, show=False)
    assert sizes(tuned) == [2, 4, 8, 12][: len(tuned.probes)]
    assert tuned.micro_batch_size in sizes(tuned)
    assert all(probe.fits and probe.samples_per_second for probe in tuned.probes)
    tried = session.pull("tried")
    assert {size for size, _ in tried} == set(sizes(tuned))
    assert all(size == samples for size, samples in tried)
    assert_as_before(session)
    assert trains_on(session, COUNTED) == comes


READ = {
    "a loader with workers": "data = torch.utils.data.DataLoader(\n"
    "    list(data), batch_size=5, shuffle=True, num_workers=2, persistent_workers=True)",
    "a stream": """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows): self.rows = rows
    def __iter__(self): return iter(self.rows)
data = Stream(data)
""",
    "a stream read once": """
class Once(torch.utils.data.IterableDataset):
    def __init__(self, rows): self.rows = iter(rows)
    def __iter__(self): return self.rows
data = Once([*data, *data])
""",
    "a function": "rows = data\ndef data(epoch): return rows[epoch:]",
}


@pytest.mark.parametrize(
    "kind",
    [
        k
        if k in ("a loader with workers", "a stream read once")
        else pytest.param(k, marks=pytest.mark.nightly)
        for k in READ
    ],
)
def test_the_place_in_the_data_is_as_before(session, kind) -> None:
    comes = trained(session, built=BUILT + READ[kind], micro_batch_size=4)
    around = children(session)
    tuned = session.tune(max=6, show=False)
    assert (tuned.micro_batch_size, tuned.table[0].ended_by) == (6, "--max")
    assert_as_before(session)
    assert children(session) == around
    assert trains_on(session, micro_batch_size=4) == comes


def children(session: Session) -> list[str | None]:
    code = "len(__import__('psutil').Process().children()), __import__('threading').active_count()"
    return [each.result for each in session.run(code, show=False)]


# ---------------------------------------------------------------- what is wrong

WRONG: dict[str, tuple[str, dict[str, Any], type[FsdpError], str]] = {
    "a bug": (
        f"{COUNTED}\nif rank == 1 and failing: raise ValueError('here')",
        {},
        CellFailedError,
        "ValueError: here",
    ),
    "a bug of the loss": (f"{COUNTED}\nloss = loss.detach()", {}, FsdpError, "loss"),
    "backward": (f"{COUNTED}\nloss.backward()", {}, FsdpError, "backward"),
    "no data": (COUNTED, {"data": None}, UsageError, "needs data"),
    "ready batches": (COUNTED, {"data": "ready"}, FsdpError, "yields ready batches"),
    "too few data": (COUNTED, {"data": "data[:1]"}, FsdpError, "data"),
}


@pytest.mark.parametrize("what", WRONG)
def test_f27_what_is_wrong_is_raised_at_once_as_itself(session, what) -> None:
    cell, options, error, said = WRONG[what]
    comes = trained(session)
    session.run(
        "failing = True\nclass Ready:\n    def __iter__(self): return iter(data)\nready = Ready()",
        show=False,
    )
    note(session)
    with pytest.raises(error, match=said):
        session.tune(cell, **{"data": "data", "show": False, **options})
    tried = session.pull("len(tried)", rank=0)
    assert tried == (1 if said in ("ValueError: here", "loss", "backward") else 0)
    assert_as_before(session)
    assert trains_on(session) == comes


def test_there_must_be_a_cell_of_samples(session) -> None:
    with pytest.raises(UsageError, match="none has run"):
        session.tune(show=False)
    session.model(
        "import torch\nmodel = torch.nn.Embedding(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = [{'input_ids': torch.ones(4).long()} for _ in range(40)]",
        show=False,
    )
    cell = "loss = model(batch['input_ids']).sum()"
    session.train(cell, data="data", tokens_per_batch=8, steps=1, show=False)
    with pytest.raises(UsageError, match="--tokens-per-batch 8"):
        session.tune(show=False)


def test_a_step_that_fails_for_its_size_is_raised_with_that_size(session) -> None:
    session.model(PLAIN, show=False)
    cell = f"{LOSS}\nif micro_batch_size > 7: raise ValueError('too wide')"
    with pytest.raises(CellFailedError, match=r"too wide\n.*tried a micro-batch of 24; all is as"):
        session.tune(cell, data="data", show=False)


def test_a_loss_that_is_not_finite_is_said_once(session) -> None:
    session.model(PLAIN, show=False)
    tuned = session.tune(f"{LOSS} * float('nan')", data="data", max=3, show=False)
    assert tuned.notes[:-1] == ["a loss of micro-batch 3 was not finite"]


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("loss = model(batch).square().mean(); fsdp.stop()", "the run ended before"),
        ("loss = model(torch.randn(2, 6)).mean()", "batches have no number of them"),
    ],
)
def test_a_speed_that_nobody_can_tell_is_no_pick(session, cell, why) -> None:
    session.model(f"{PLAIN}\nwords = ['a'] * 48", show=False)
    data = "words" if "randn" in cell else "data"
    with pytest.raises(UsageError, match=why):
        session.tune(cell, data=data, objective="throughput", show=False)


def test_what_a_step_adds_to_an_optimizers_groups_is_gone_again(session) -> None:
    session.model(PLAIN, show=False)
    note(session)
    cell = f"{LOSS}\noptimizer.param_groups[0].update(lr=7.0, first_step=1)"
    session.tune(cell, data="data", max=2, show=False)
    assert_as_before(session)


def test_there_must_be_a_sharded_model_for_strategies(session) -> None:
    session.run(PLAIN, show=False)
    with pytest.raises(UsageError, match="no sharded model"):
        session.tune(LOSS, data="data", strategies=["ddp", "full_shard"], show=False)


def test_a_scheduler_that_is_through_refuses_no_search(session) -> None:
    scheduler = "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)"
    session.model(f"{PLAIN}\nscheduler = {scheduler}", show=False)
    session.train(LOSS, data="data", steps=2, micro_batch_size=2, show=False)
    note(session)
    assert session.tune(max=4, show=False).micro_batch_size == 4
    assert_as_before(session)


# ---------------------------------------------------------------- how far it goes


@pytest.mark.parametrize(
    ("options", "found", "ended_by"),
    [
        ({}, 45, "the data"),
        ({"max": 7}, 7, "--max"),
        ({"accumulate": 4}, 11, "the data"),
        ({"global_batch_size": 24}, 12, "the global batch"),
        ({"global_batch_size": 24, "max": 5}, 4, "--max"),
        ({"data_sharding": "none", "global_batch_size": 24}, 24, "the global batch"),
    ],
)
def test_f26_it_ends_at_the_data_or_where_it_is_told(session, options, found, ended_by) -> None:
    session.model(BUILT, names=["model", "teacher"], show=False)
    tuned = session.tune(CELL, data="data", show=False, **options)
    assert (tuned.micro_batch_size, tuned.table[0].ended_by) == (found, ended_by)
    assert len(tuned.probes) <= 2


# ---------------------------------------------------------------- what comes of it

PLAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, other = list(torch.randn(48, 6)), list(torch.randn(48, 6))
most = 6
"""
LOSS = "loss = model(batch).square().mean()"


def size_of(session: Session, **options: Any) -> int | None:
    options = {"data": "data", "steps": 1, "show": False, **options}
    return session.train(LOSS, **options).micro_batch_size


def test_the_next_training_takes_the_size_on_the_same_data_only(session) -> None:
    session.model(PLAIN, show=False)
    tuned = session.tune(LOSS, data="data", max="most", show=False)
    assert tuned.micro_batch_size == 6
    assert size_of(session) == 6
    assert any("from %fsdp_tune" in note for note in session.runs[-1].notes)
    assert size_of(session, data="other") == 8
    assert size_of(session, micro_batch_size=3) == 3
    assert size_of(session, global_batch_size=20) == 5
    tuned.choose(4)
    assert size_of(session) == 4
    with pytest.raises(UsageError, match="up to 24"):
        tuned.choose(25)
    assert size_of(session) == 4
    session.model(PLAIN, show=False)
    assert size_of(session) == 8
    tuned = session.tune(LOSS, data="data", global_batch_size=16, max=6, show=False)
    assert (tuned.micro_batch_size, tuned.accumulate) == (4, 2)
    session.restart()
    session.model(PLAIN, show=False)
    assert size_of(session) == 8


def test_the_last_cell_is_tried_again_trained_or_tuned(session) -> None:
    session.restart()
    session.model(PLAIN, show=False)
    with pytest.raises(UsageError, match="none has run"):
        session.tune(show=False)
    session.run("tried = []", show=False)
    session.tune(f"tried.append(step)\n{LOSS}", data="data", accumulate=2, max=2, show=False)
    session.run("tried.clear()", show=False)
    assert session.tune(show=False).micro_batch_size == 12, "as it was told, without its --max"
    assert session.tune(max=3, accumulate=1, show=False).micro_batch_size == 3
    assert session.pull("len(tried) > 0")
    with pytest.raises(UsageError, match="data"):
        session.tune("not a cell", show=False)
    size_of(session, accumulate=3)
    session.run("tried.clear()", show=False)
    assert session.tune(show=False).micro_batch_size == 8
    assert session.pull("len(tried) == 0"), "it is not the cell that was tuned before"


def test_a_table_finds_what_models_built_so_would_find(session) -> None:
    session.model(PLAIN, show=False)
    session.train(LOSS, data="data", steps=2, micro_batch_size=4, show=False)
    comes = session.train(LOSS, data="data", steps=2, trial=True, micro_batch_size=4, show=False)
    note(session)
    names = ["ddp", "full_shard+bf16", "full_shard"]
    tuned = session.tune(max=6, strategies=names, show=False)
    assert_as_before(session)
    run = session.train(LOSS, data="data", steps=2, micro_batch_size=4, show=False)
    assert run.losses == comes.losses
    assert [row.name for row in tuned.table] == names
    assert [row.is_present for row in tuned.table] == [False, False, True]
    assert [row.micro_batch_size for row in tuned.table] == [6, 6, 6]
    assert size_of(session) == 6


def test_a_strategy_that_cannot_run_is_a_row_with_its_reason(session) -> None:
    session.model(PLAIN, show=False)
    session.run("failing = True", show=False)
    cell = f"{LOSS}\nif type(model).__name__.startswith('FSDP'): torch.ones(2**50)"
    tuned = session.tune(cell, data="data", max=2, strategies=["full_shard", "ddp"], show=False)
    full_shard, ddp = tuned.table
    assert (full_shard.micro_batch_size, ddp.micro_batch_size) == (0, 2)
    assert "out of memory" in full_shard.failure
    assert tuned.best is ddp
    assert size_of(session) == 8, "what fits another strategy is no default for this one"


def test_line_cell_and_call_give_the_same(session, monkeypatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from fsdp_magic.notebook import sessions

    shell = InteractiveShell()
    monkeypatch.setattr(sessions, "current", lambda: session)
    shell.run_line_magic("load_ext", "fsdp_magic")
    session.model(PLAIN, show=False)
    options = "--max most --accumulate 2 --margin 0.1"
    shell.run_cell_magic("fsdp_tune", f"--data data {options} -o cell", LOSS)
    session.train(LOSS, data="data", accumulate=2, steps=1, show=False)
    shell.run_line_magic("fsdp_tune", f"{options} -o line  # as the last cell")
    call = session.tune(max="most", accumulate=2, margin=0.1, show=False)
    for tuned in (shell.user_ns["cell"], shell.user_ns["line"], call):
        assert (tuned.micro_batch_size, tuned.accumulate, tuned.margin) == (6, 2, 0.1)
        assert sizes(tuned) == [6]
