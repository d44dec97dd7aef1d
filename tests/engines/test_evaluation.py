"""``%%fsdp_eval``: every sample once, the same result as one process, and no trace left."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import interrupted_after, stop_pressed

from fsdp_magic.errors import CellFailedError, CellInterrupted

BUILT = """
import torch
import torch.nn as nn

torch.manual_seed(1)
model = nn.Sequential(
    nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(64, 6, generator=generator, dtype=torch.float64)
labels = torch.randint(0, 3, (64,), generator=generator)
data = list(zip(inputs, labels))
held_out = data[:13]
"""
TRAINING = """
x, y = batch
loss = nn.functional.cross_entropy(model(x), y)
"""
CELL = """
x, y = batch
logits = model(x)
loss = nn.functional.cross_entropy(logits, y)
metrics = {"accuracy": (logits.argmax(-1) == y).double().mean(), "samples": len(x)}
collect = {"logits": logits, "label": y, "text": [f"row {int(i)}" for i in y]}
"""
WHOLE = "dict(model.named_parameters())"
STEPS = {"data": "data", "steps": 4, "micro_batch_size": 4, "show": False}


def evaluated(session: Any, code: str = CELL, **options: Any) -> Any:
    return session.eval(
        code, **{"data": "held_out", "micro_batch_size": 4, "show": False} | options
    )


def by_itself(samples: int = 13, first: int = 0) -> dict[str, Any]:
    """Evaluate in this process, all samples at once."""
    names: dict[str, Any] = {}
    exec(BUILT, names)
    x, y = names["inputs"][first : first + samples], names["labels"][first : first + samples]
    with torch.no_grad():
        logits = names["model"].eval()(x)
    loss = torch.nn.functional.cross_entropy(logits, y).item()
    right = (logits.argmax(-1) == y).double().mean().item()
    return {"loss": loss, "accuracy": right, "logits": logits.numpy(), "label": y.numpy()}


@pytest.mark.parametrize("samples", [13, 16, 9, 2, 1])
def test_an_evaluation_equals_one_process_over_all_samples_once(session, samples):
    session.model(BUILT, show=False)
    found = evaluated(session, data=f"data[:{samples}]")
    alone = by_itself(samples)
    assert found.loss == pytest.approx(alone["loss"], rel=1e-12)
    assert found.metrics["accuracy"] == pytest.approx(alone["accuracy"], rel=1e-12)
    assert found.samples == samples
    np.testing.assert_allclose(found.collected["logits"], alone["logits"], rtol=1e-12)
    assert found.collected["label"].tolist() == alone["label"].tolist()
    assert found.collected["text"] == [f"row {y}" for y in alone["label"]]


def test_four_ranks_find_the_same(world):
    session = world(4)
    session.model(BUILT, show=False)
    found = evaluated(session)
    assert found.loss == pytest.approx(by_itself()["loss"], rel=1e-12)
    np.testing.assert_allclose(found.collected["logits"], by_itself()["logits"], rtol=1e-12)


def test_a_loss_weight_weighs_loss_and_metrics(session):
    session.model(BUILT, show=False)
    weighed = (
        "x, y = batch\nkept = y != 0\nlogits = model(x)\nloss_weight = int(kept.sum())\n"
        "loss = nn.functional.cross_entropy(logits[kept], y[kept])\n"
        "metrics = {'accuracy': (logits.argmax(-1) == y)[kept].double().mean()}\n"
    )
    found = evaluated(session, weighed, micro_batch_size=3)
    alone = by_itself()
    logits, y = torch.tensor(alone["logits"]), torch.tensor(alone["label"])
    loss = torch.nn.functional.cross_entropy(logits[y != 0], y[y != 0]).item()
    assert found.loss == pytest.approx(loss, rel=1e-12)
    right = (logits.argmax(-1) == y)[y != 0].double().mean().item()
    assert found.metrics["accuracy"] == pytest.approx(right, rel=1e-12)


def test_a_metric_that_only_some_batches_have_is_the_mean_of_those(session):
    session.model(BUILT, show=False)
    cell = "model(batch[0])\nmetrics = {'a': 2.0} if rank else {'b': len(batch[0])}"
    # passes take 4 + 4, 4 + 1: rank 0 has two batches of four, rank 1 one of four and one of one
    found = evaluated(session, cell)
    assert found.metrics == {"a": 2.0, "b": 4.0}
    assert found.loss is None


ROWS = {
    "tensor": ("batch[1]", lambda y: y.tolist()),
    "bf16": ("batch[1].to(torch.bfloat16)", lambda y: [float(v) for v in y]),
    "list of numbers": ("[int(v) for v in batch[1]]", lambda y: [int(v) for v in y]),
    "list of tensors": ("list(batch[1])", lambda y: [int(v) for v in y]),
    "strings": ("[str(int(v)) for v in batch[1]]", lambda y: [str(int(v)) for v in y]),
    "ragged": ("[torch.arange(int(v)) for v in batch[1]]", lambda y: [list(range(v)) for v in y]),
    "dicts": ("[{'v': v} for v in batch[1]]", lambda y: [{"v": int(v)} for v in y]),
    "numpy": ("batch[1].numpy()", lambda y: y.tolist()),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_come_back_in_the_order_of_the_data(session, kind):
    session.model(BUILT, show=False)
    expression, expected = ROWS[kind]
    found = evaluated(session, f"model(batch[0])\ncollect = {{'rows': {expression}}}")
    rows = found.collected["rows"]
    plain = rows.tolist() if isinstance(rows, np.ndarray) else rows
    plain = [row.tolist() if isinstance(row, np.ndarray) else row for row in plain]
    assert plain == expected(by_itself()["label"])
    assert isinstance(rows, np.ndarray) == (kind in ("tensor", "bf16", "numpy"))


def test_rows_padded_to_their_batch_come_as_a_list(session):
    session.model(BUILT, show=False)
    cell = "model(batch[0])\ncollect = {'rows': torch.ones(len(batch[1]), 2 + rank)}"
    rows = evaluated(session, cell).collected["rows"]
    assert [len(row) for row in rows] == [2] * 4 + [3] * 4 + [2] * 4 + [3]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("collect = {'rows': [1, 2]}", "has 2 rows and the batch 4 samples"),
        ("collect = {'rows': torch.ones(())}", "is one number; it takes one row per sample"),
        ("collect = {'rows': 'text'}", "is a str; it takes one row per sample"),
        ("collect = [1]", "`collect` is a list"),
        ("metrics = 3", "`metrics` is a int"),
        ("metrics = {'a': torch.ones(2)}", r"has shape \(2,\)"),
        ("metrics = {'a': 'b'}", "is a str"),
        ("x = 1", "binds none of `loss`, `metrics` and `collect`"),
        ("loss = 1.0", "`loss` is a float"),
        ("loss = torch.ones(2)", r"has shape \(2,\)"),
        ("loss = model(batch[0]).sum()\nloss.backward()", "line 3 of the cell calls backward()"),
        ("optimizer.step()", r"calls step\(\) of SGD, and an evaluation changes nothing"),
        ("model.zero_grad()", r"calls zero_grad\(\) of FSDPSequential"),
        ("%time\nloss = 1", "uses a magic"),
    ],
)
def test_a_cell_that_cannot_be_evaluated_is_refused_in_one_line(session, cell, words):
    session.model(BUILT, show=False)
    with pytest.raises(CellFailedError, match=words) as caught:
        evaluated(session, f"model(batch[0])\n{cell}" if "%" not in cell else cell)
    assert "\n" not in str(caught.value)
    assert evaluated(session).samples == 13


MODES = "[(n, m.training) for n, m in model.named_modules()]"


@pytest.mark.parametrize("failing", [False, True])
def test_every_module_has_its_own_mode_afterwards(session, failing):
    session.model(BUILT + "model.train()\nmodel[2].eval()\nother = nn.Dropout()", show=False)
    before = session.pull(MODES)
    assert {mode for _, mode in before} == {True, False}
    cell = (
        "assert not torch.is_grad_enabled()\n"
        "assert not other.training and not any(m.training for m in model.modules())\n" + CELL
    )
    if failing:
        with pytest.raises(CellFailedError, match="ZeroDivisionError"):
            evaluated(session, cell + "if rank: 1 / 0")
    else:
        evaluated(session, cell)
    assert session.pull(MODES) == before
    assert session.pull("other.training") is True
    assert session.pull("torch.is_grad_enabled()") is True


def test_running_statistics_are_averaged_over_the_ranks_first(session):
    session.model(BUILT.replace("nn.Dropout(0.25)", "nn.BatchNorm1d(16)"), show=False)
    session.train(TRAINING, **STEPS)
    means = session.pull("model[2].running_mean.clone()", rank="all")
    assert not torch.equal(means[0], means[1])
    evaluated(session)
    for after in session.pull("model[2].running_mean", rank="all"):
        torch.testing.assert_close(after, (means[0] + means[1]) / 2, rtol=1e-12, atol=0)


def test_a_module_of_one_rank_only_does_not_matter(session):
    session.model(BUILT, show=False)
    session.run("if rank == 0:\n    mine = nn.BatchNorm1d(3)", show=False)
    assert evaluated(session).samples == 13


@pytest.mark.parametrize("inside", [False, True])
def test_training_goes_on_as_if_nothing_had_been_evaluated(session, inside):
    """With dropout, whose draws an evaluation must not use up, and shuffled data."""
    draws = "torch.randn(3)\n"

    def losses(*, evaluating: bool) -> list[float]:
        session.model(BUILT, show=False)
        session.run(
            "from fsdp_magic.engine.randomness import TrainingRandomness\n"
            "import builtins\n"
            "engine = builtins._fsdp_magic_call.__self__\n"
            "engine._randomness = TrainingRandomness(0, rank)",
            show=False,
        )
        found: list[float] = []
        if inside:
            every = {"eval_every": 1, "eval_data": "held_out"} if evaluating else {}
            run = session.train(draws + TRAINING, **STEPS | {"steps": 12}, **every)
            assert len(run.evaluations) == (12 if evaluating else 0)
            return run.losses
        for _ in range(3):
            found += session.train(TRAINING, **STEPS).losses
            if evaluating:
                evaluated(session, draws + CELL)
        return found

    assert losses(evaluating=True) == losses(evaluating=False)
    assert session.status(show=False)[0].steps == 12


def test_names_of_a_training_cell_survive_an_evaluation_inside_it(session):
    session.model(BUILT + "seen = []", show=False)
    session.eval(
        "seen.append(('eval', step, epoch, micro_step, micro_batch_size))\n"
        "collect = {'x': batch[1]}\nmetrics = {'m': 1.0}",
        data="held_out",
        micro_batch_size=8,
        show=False,
    )
    cell = TRAINING + "seen.append((step, epoch, micro_step, micro_batch_size, len(batch[0])))"
    run = session.train(cell, **STEPS | {"steps": 3}, eval_every=2, output="run")
    assert [record.step for record in run.evaluations] == [2]
    assert session.pull("seen") == [
        ("eval", 0, 0, 0, 8),
        (0, 0, 0, 4, 4),
        (1, 0, 0, 4, 4),
        ("eval", 2, 0, 0, 8),
        (2, 0, 0, 4, 4),
    ]
    assert "collect" not in session.pull("list(globals())")


def test_a_training_cell_without_data_may_be_evaluated_on_some(session):
    session.model(BUILT, show=False)
    evaluated(session)
    cell = "x, y = inputs[:4], labels[:4]\nloss = nn.functional.cross_entropy(model(x), y)"
    run = session.train(cell, steps=2, eval_every=1, show=False)
    assert len(run.evaluations) == 2
    assert "batch" not in session.pull("list(globals())")


KINDS = {
    "DataLoader": "torch.utils.data.DataLoader(held_out, batch_size=4)",
    "shuffling DataLoader": "torch.utils.data.DataLoader(held_out, batch_size=4, shuffle=True)",
    "IterableDataset": "Streamed()",
    "ready batches": "Ready()",
    "function": "lambda: held_out",
}
STREAM = """
class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(held_out)

class Ready:
    def __iter__(self):
        for first in range(0, 13, 4):
            yield inputs[first:min(first + 4, 13)], labels[first:min(first + 4, 13)]
"""


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_data_is_evaluated_once(session, kind):
    session.model(BUILT + STREAM + f"source = {KINDS[kind]}", show=False)
    options = {} if kind == "ready batches" else {"micro_batch_size": 4}
    found = session.eval(CELL, data="source", show=False, **options)
    # ready batches are taken as they are on each rank, which read the same ones here
    copies = 2 if kind == "ready batches" else 1
    assert found.samples == 13 * copies
    assert found.loss == pytest.approx(by_itself()["loss"], rel=1e-12)
    labels = np.sort(found.collected["label"])
    assert labels.tolist() == sorted(by_itself()["label"].tolist() * copies)


def test_without_data_the_cell_runs_once_on_each_rank(session):
    session.model(BUILT, show=False)
    cell = (
        "seen = step\nlogits = model(inputs[rank * 4:rank * 4 + 4])\n"
        "loss = nn.functional.cross_entropy(logits, labels[rank * 4:rank * 4 + 4])\n"
        "collect = {'logits': logits}"
    )
    found = session.eval(cell, show=False)
    assert found.loss == pytest.approx(by_itself(8)["loss"], rel=1e-12)
    np.testing.assert_allclose(found.collected["logits"], by_itself(8)["logits"], rtol=1e-12)
    assert "samples" not in repr(found)


def test_a_collate_makes_the_batches(session):
    session.model(
        BUILT + "def columns(samples):\n"
        "    return {'x': torch.stack([x for x, _ in samples]),\n"
        "            'y': torch.stack([y for _, y in samples])}",
        show=False,
    )
    cell = "x, y = batch['x'], batch['y']\nloss = nn.functional.cross_entropy(model(x), y)"
    found = evaluated(session, cell, collate="columns")
    assert found.loss == pytest.approx(by_itself()["loss"], rel=1e-12)


def test_a_model_that_was_never_sharded_is_evaluated_as_it_is(session):
    session.run(BUILT, show=False)
    assert evaluated(session).loss == pytest.approx(by_itself()["loss"], rel=1e-12)
    assert session.pull("type(model).__name__") == "Sequential"


def test_an_optimizer_with_an_eval_mode_is_in_it_meanwhile(session):
    session.model(
        BUILT + "class Free(torch.optim.SGD):\n"
        "    def train(self): self.param_groups[0]['train_mode'] = True\n"
        "    def eval(self): self.param_groups[0]['train_mode'] = False\n"
        "optimizer = Free(model.parameters(), lr=0.1)\noptimizer.eval()",
        show=False,
    )
    mode = "optimizer.param_groups[0]['train_mode']"
    evaluated(session, f"assert not {mode}\n{CELL}")
    assert session.pull(mode) is False
    session.train(f"assert {mode}\n{TRAINING}", **STEPS)
    evaluated(session, f"assert not {mode}\n{CELL}")
    assert session.pull(mode) is True


def test_an_exception_on_one_rank_leaves_the_session_usable(session):
    session.model(BUILT, show=False)
    with pytest.raises(CellFailedError) as caught:
        evaluated(session, "if rank == 1:\n    1 / 0\n" + CELL)
    assert caught.value.ranks == (1,)
    assert evaluated(session).loss == pytest.approx(by_itself()["loss"], rel=1e-12)
    assert session.train(TRAINING, **STEPS).state == "done"


def test_an_interrupt_leaves_the_session_usable(session):
    session.model(BUILT + "import time", show=False)
    with interrupted_after(0.5), pytest.raises(CellInterrupted):
        evaluated(session, "time.sleep(60)\n" + CELL)
    assert evaluated(session).loss == pytest.approx(by_itself()["loss"], rel=1e-12)


def test_an_interrupt_ends_an_evaluation_inside_a_run_and_the_run(session):
    session.model(BUILT + "import time\nseconds = 0", show=False)
    cell = f"time.sleep(seconds)\n{stop_pressed('seconds and micro_step == 3')}{CELL}"
    evaluated(session, cell, data="data * 20", micro_batch_size=1)
    session.run("seconds = 0.05", show=False)
    with interrupted_after(), pytest.raises(CellInterrupted) as caught:
        session.train(TRAINING, **STEPS, eval_every=2)
    run = caught.value.run
    assert (run.state, run.steps, run.evaluations) == ("stopped", 2, [])


def test_a_timeout_ends_an_evaluation(session):
    session.model(BUILT + "import time", show=False)
    with pytest.raises(CellFailedError, match="stopped after"):
        evaluated(session, "time.sleep(60)\n" + CELL, timeout=0.5)
    assert evaluated(session).samples == 13


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"data": "data,held_out"}, "an evaluation runs over one"),
        ({"data": "[]"}, "empty"),
        ({"collate": "nowhere"}, "nowhere"),
        ({"collate": "labels"}, "--collate labels is a Tensor"),
        ({"data": "iter([inputs])"}, "--micro-batch-size"),
    ],
)
def test_data_that_cannot_be_evaluated_is_refused_in_one_line(session, options, words):
    session.model(BUILT, show=False)
    with pytest.raises(CellFailedError, match=words) as caught:
        evaluated(session, **options)
    assert "\n" not in str(caught.value)


def test_a_weight_of_zero_everywhere_is_not_a_number(session):
    session.model(BUILT, show=False)
    cell = "loss = model(batch[0]).sum()\nloss_weight = 0"
    assert math.isnan(evaluated(session, cell).loss)
