"""Each wrong use of training and evaluation is refused in one line that says what to type."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_magic.errors import CellFailedError, UsageError

BUILT = """
import torch
import torch.nn as nn

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = list(zip(torch.ones(32, 6).double(), torch.ones(32, 3).double()))
"""
GOOD = "x, y = batch\nloss = (model(x) - y).pow(2).mean()"
OPTIONS = {"data": "data", "micro_batch_size": 4, "steps": 2, "show": False}

CELLS = {
    "loss.backward()": "line 3 of the cell calls backward(), and %%fsdp_train takes `loss` "
    "backward itself; delete it: loss.backward(), or type --manual",
    "optimizer.step()": "calls step() of SGD, and %%fsdp_train steps every optimizer itself; "
    "delete it: optimizer.step()",
    "optimizer.zero_grad()": "calls zero_grad() of SGD, and %%fsdp_train clears gradients itself",
    "scheduler.step()": "calls step() of a scheduler, and %%fsdp_train steps schedulers itself",
    "loss = loss.item()": "`loss` is a float; it must be a tensor of one element",
    "loss = loss.detach()": "`loss` does not require grad, so there is nothing to train; compute "
    "it outside torch.no_grad()",
    "loss = model(x)": "`loss` has shape (4, 3); it must have one element: loss = loss.mean()",
    "del loss": "the cell binds no `loss`; end it with a line such as: loss = ",
    "losss = loss; del loss": "the cell binds no `loss`; `losss` is another name; end it with",
    "loss = torch.ones(1, requires_grad=True).sum()": "no parameter of `optimizer` takes part in "
    "`loss`, so no step would change anything; make an optimizer of the parameters that do",
    "metrics = 0.5": "`metrics` is a float; it is a dict of numbers: metrics = {",
    "metrics = {'a': x}": "metrics['a'] has shape (4, 6); it is a number or a tensor of one",
    "metrics = {'a': 'b'}": "metrics['a'] is a str; it is a number or a tensor of one element",
    "loss_weight = -1": "`loss_weight` is -1; it is a number from 0",
    "loss_weight = x": "`loss_weight` has shape (4, 6); it is one number",
    "%time x": "line 3 uses a magic; a training cell is plain Python",
    "await x": "line 3 awaits at top level, which a cell on engines cannot; wrap it: asyncio.run",
}


def refused(session: Any, cell: str, **options: Any) -> str:
    """Return the line with which a training cell is refused, and see that training still works."""
    with pytest.raises((CellFailedError, UsageError)) as caught:
        session.train(cell, **OPTIONS | options)
    assert "\n" not in str(caught.value)
    assert session.train(GOOD, **OPTIONS).state == "done"
    return str(caught.value)


@pytest.mark.parametrize("line", CELLS)
def test_a_wrong_line_of_a_cell_is_refused(session, line):
    scheduler = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)"
    session.model(BUILT + scheduler, show=False)
    assert CELLS[line] in refused(session, f"{GOOD}\n{line}")


OF_OPTIONS = [
    ({"data": "nowhere"}, "--data nowhere"),
    ({"data": "[]"}, "empty"),
    ({"collate": "nowhere"}, "--collate nowhere"),
    ({"collate": "data"}, "--collate data is a list; it takes a function"),
    ({"after_step": "nowhere"}, "--after-step nowhere"),
    ({"after_step": "data"}, "--after-step is a list; it takes a function of the engines"),
    ({"eval_every": 1}, "add --eval-data NAME for this cell on those data, or run a %%fsdp_eval"),
    ({"eval_every": 1, "eval_data": "nowhere"}, "--eval-data nowhere"),
    ({"eval_every": 1, "eval_data": "data,data"}, "an evaluation runs over one"),
    ({"eval_every": 1, "eval_data": "iter([1])"}, "--eval-data iter([1]): --micro-batch-size 4"),
    ({"resume": True}, "--resume finishes a run that ended early, and none has begun"),
    ({"loss": "tokens"}, '--loss tokens counts batch["labels"], and the batch has none'),
    ({"steps": "nowhere"}, "--steps nowhere is no number on the engines"),
    ({"global_batch_size": 7}, "--global-batch-size 7"),
    ({"log": "print"}, "--log 'print' is not a function of the notebook"),
]


@pytest.mark.parametrize(("options", "words"), OF_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_wrong_option_is_refused(session, options, words):
    session._newest_evaluation = None
    session.model(BUILT, show=False)
    message = refused(session, "ran = True\n" + GOOD, **options)
    assert words in message
    if "loss" not in options:  # that one is known with the first batch
        assert "ran" not in session.pull("list(globals())")


def test_loss_sum_with_a_weight_is_refused(session):
    session.model(BUILT, show=False)
    cell = GOOD + "\nloss_weight = 4"
    assert "--loss sum adds losses up, and loss_weight is for means" in refused(
        session, cell, loss="sum"
    )


def test_a_model_without_an_optimizer_is_refused(session):
    session.model(BUILT, show=False)
    session.run("kept, optimizer = [optimizer.state_dict()], None", show=False)
    with pytest.raises(CellFailedError, match="no optimizer is bound on the engines; make one in"):
        session.train(GOOD, **OPTIONS)


def test_an_unknown_option_of_the_api_is_refused(session):
    with pytest.raises((TypeError, UsageError), match="stepz"):
        session.train(GOOD, stepz=3)


def test_a_name_that_the_cell_binds_is_not_taken_from_the_person(session):
    session.model(BUILT + "def loss(a, b): return (a - b).pow(2).mean()", show=False)
    with pytest.raises(CellFailedError, match="is a name that this cell binds"):
        session.train("x, y = batch\nloss = loss(model(x), y)", **OPTIONS)
