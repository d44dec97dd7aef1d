"""Who is in train mode during a run, and what is named before it."""

from __future__ import annotations

import pytest

from fsdp_magic.errors import FsdpError
from fsdp_magic.notebook.session import Session

NET = """
import torch
import torch.nn as nn

def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))

model, teacher = net(), net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(4), torch.randn(2)) for _ in range(32)]
"""
CELL = """
x, y = batch
loss = (model(x) - y).pow(2).mean()
modes = (model.training, model[1].training, teacher.training)
"""


def notes_of(session: Session, *, cell: str = CELL) -> str:
    run = session.train(cell, data="data", steps=1, micro_batch_size=4, show=False)
    return "\n".join(run.notes)


def test_what_is_trained_is_put_in_train_mode_and_a_teacher_stays_in_eval(session):
    session.model(NET + "model.eval(); teacher.eval()", show=False)
    assert "model was in eval mode and is in train mode now" in notes_of(session)
    assert session.pull("modes", rank="all") == [(True, True, False)] * 2
    assert "eval mode" not in notes_of(session)


def test_a_part_that_a_person_keeps_in_eval_mode_stays_there(session):
    session.model(NET + "teacher.eval(); model[1].eval()", show=False)
    assert "eval mode" not in notes_of(session)
    assert session.pull("modes", rank="all") == [(True, False, False)] * 2


# -- what looks wrong


def test_a_trained_parameter_in_no_optimizer_is_named(session):
    session.model(NET + "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)", show=False)
    assert "in no optimizer, so not trained: model.2.weight, model.2.bias" in notes_of(session)


def test_a_frozen_parameter_in_no_optimizer_is_not(session):
    session.model(
        NET + "model[2].requires_grad_(False)\n"
        "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)",
        show=False,
    )
    assert "in no optimizer" not in notes_of(session)


def test_an_optimizer_of_a_model_that_was_replaced_is_named(session):
    session.model(NET, show=False)
    session.model("model = net()", show=False)
    with pytest.raises(FsdpError, match=r"optimizer holds sharded .* of a model that is gone"):
        notes_of(session)


def test_an_optimizer_of_a_part_that_was_replaced_is_named(session):
    session.run(NET + "model[2] = nn.Linear(4, 2)", show=False)
    session.model("pass", "model", show=False)
    text = notes_of(session)
    assert "in no optimizer, so not trained: model.2.weight, model.2.bias" in text
    assert "optimizer holds 2 parameters that no model and no variable has" in text
