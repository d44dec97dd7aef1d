"""``--manual``: the cell is one whole step; and calls that an automatic cell must not make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import check_equal, norm_of

from fsdp_magic.errors import CellFailedError, UsageError

STRATEGIES = ("full_shard", "shard_grad_op")
NET = """
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Linear(2, 2)  # used nowhere: must not be decayed

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) * self.scale

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(64, 6, generator=generator)
targets = torch.randint(0, 3, (64,), generator=generator)
data = list(zip(inputs, targets))
"""


def batches_of(names: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(4):
        rows = slice(16 * step, 16 * step + 16)
        yield names["inputs"][rows], names["targets"][rows]


def plain(names: dict[str, Any], *, clip: float | None = None) -> Iterator[tuple[float, float]]:
    model, optimizer = names["model"], names["optimizer"]
    for x, y in batches_of(names):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        norm = norm_of(*model.parameters())
        optimizer.step()
        yield loss.item(), norm


STEPS = {
    "cleared before": """
optimizer.zero_grad()
loss = F.cross_entropy(model(batch[0]), batch[1])
loss.backward()
optimizer.step()
""",
    "cleared between forward and backward": """
loss = F.cross_entropy(model(batch[0]), batch[1])
optimizer.zero_grad()
model.zero_grad()
loss.backward()
optimizer.step()
""",
    "by the module, between forward and backward": """
loss = F.cross_entropy(model(batch[0]), batch[1])
model.zero_grad()
loss.backward()
optimizer.step()
""",
    "cleared after": """
loss = F.cross_entropy(model(batch[0]), batch[1])
loss.backward()
optimizer.step()
optimizer.zero_grad(set_to_none=False)
""",
    "two backwards": """
optimizer.zero_grad()
for half in (slice(0, 4), slice(4, 8)):
    part = F.cross_entropy(model(batch[0][half]), batch[1][half]) / 2
    part.backward()
loss = F.cross_entropy(model(batch[0]), batch[1])
optimizer.step()
""",
    "without reducing the first half": """
optimizer.zero_grad()
with fsdp.no_sync(model):
    (F.cross_entropy(model(batch[0][:4]), batch[1][:4]) / 2).backward()
(F.cross_entropy(model(batch[0][4:]), batch[1][4:]) / 2).backward()
loss = F.cross_entropy(model(batch[0]), batch[1])
optimizer.step()
""",
    "in functions": """
def compute():
    return F.cross_entropy(model(batch[0]), batch[1])

def update(loss):
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()

loss = compute()
update(loss)
""",
}


@pytest.mark.parametrize("way", STEPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_manual_step_equals_one_process(session, way, strategy):
    check_equal(
        session,
        NET,
        STEPS[way],
        plain,
        strategy=strategy,
        data="data",
        steps=4,
        micro_batch_size=8,
        manual=True,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_by_hand_equals_one_process(session, strategy):
    cell = """
optimizer.zero_grad()
loss = F.cross_entropy(model(batch[0]), batch[1])
loss.backward()
squares = [fsdp.whole(p.grad).pow(2).sum() for p in model.parameters() if p.grad is not None]
norm = torch.stack(squares).sum().sqrt()
for p in model.parameters():
    if p.grad is not None:
        p.grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0).item())
optimizer.step()
"""
    check_equal(
        session,
        NET,
        cell,
        lambda names: plain(names, clip=0.1),
        strategy=strategy,
        data="data",
        steps=4,
        micro_batch_size=8,
        manual=True,
    )


def test_a_step_without_loss_and_optimizer_counts_all_the_same(session):
    session.model(NET, show=False)
    run = session.train("seen = (step, len(batch[0]))", data="data", manual=True, show=False)
    assert (run.state, run.steps, run.losses) == ("done", 4, [])
    assert session.pull("seen") == (3, 8)
    assert all(norm != norm for norm in run.grad_norms), "NaN: nothing stepped"
    assert "loss n/a" in run.last_frame[1]


def test_metrics_and_stop_work_in_a_manual_cell(session):
    session.model(NET, show=False)
    cell = (
        STEPS["cleared before"]
        + """
metrics = {"rank": rank}
if step == 2 and rank == 1:
    fsdp.stop()
"""
    )
    run = session.train(cell, data="data", steps=10, manual=True, show=False)
    assert (run.state, run.steps) == ("done", 3)
    assert run.metrics == {"rank": [0.5] * 3}


def test_a_manual_cell_that_fails_leaves_the_session_usable(session):
    session.model(NET, show=False)
    cell = "loss = F.cross_entropy(model(batch[0]), batch[1])\nif rank == 1: 1 / 0\nloss.backward()"
    with pytest.raises(CellFailedError, match="ZeroDivisionError"):
        session.train(cell, data="data", steps=2, manual=True, show=False)
    check_equal(
        session,
        NET,
        STEPS["cleared before"],
        plain,
        data="data",
        steps=4,
        micro_batch_size=8,
        manual=True,
    )


LOSS = "loss = F.cross_entropy(model(batch[0]), batch[1])\n"
STRAY = {
    "backward": (
        LOSS + "loss.backward()",
        "line 2 of the cell calls backward(), and %%fsdp_train takes `loss` backward itself; "
        "delete it: loss.backward(), or type --manual",
    ),
    "backward of a function": (
        LOSS + "def f():\n    torch.autograd.backward([loss])\nf()",
        "line 3 of the cell calls backward(), and",
    ),
    "the optimizer": (
        LOSS + "optimizer.step()",
        "line 2 of the cell calls step() of SGD, and %%fsdp_train steps every optimizer itself; "
        "delete it: optimizer.step(), or",
    ),
    "the optimizer's gradients": (
        LOSS + "optimizer.zero_grad()",
        "calls zero_grad() of SGD, and %%fsdp_train clears gradients itself",
    ),
    "the module's gradients": ("model.zero_grad()\n" + LOSS, "calls zero_grad() of Net, and"),
    "a scheduler": (
        LOSS + "scheduler.step()",
        "calls step() of a scheduler, and %%fsdp_train steps schedulers itself; delete it: "
        "scheduler.step(), or",
    ),
}


@pytest.mark.parametrize("stray", STRAY)
def test_a_stray_call_is_refused_with_its_line(session, stray):
    cell, message = STRAY[stray]
    scheduler = "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)\n"
    session.model(NET + scheduler, show=False)
    before = session.pull("dict(model.named_parameters())")
    with pytest.raises(CellFailedError) as caught:
        session.train(cell, data="data", show=False)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    after = session.pull("dict(model.named_parameters())")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert session.train(LOSS, data="data", show=False).steps == 4


def test_other_objects_may_step_and_go_backward(session):
    session.model(NET, show=False)
    session.run(
        "class Env:\n    def step(self): return 1\n    def zero_grad(self): return 2\n"
        "    def backward(self): return 3\nenv = Env()",
        show=False,
    )
    cell = LOSS + "did = env.step(), env.zero_grad(), env.backward()"
    session.train(cell, data="data", show=False)
    assert session.pull("did") == (1, 2, 3)


def test_torch_is_as_it_was_after_a_run(session):
    session.model(NET, show=False)
    session.train(LOSS, data="data", show=False)
    session.run(
        "x = torch.ones(2, requires_grad=True)\nx.sum().backward()\n"
        "o = torch.optim.SGD([x], lr=1.0)\no.step()\no.zero_grad()\nvalue = x.tolist()\ndel o, x\n"
        "names = torch.Tensor.backward.__module__, torch.nn.Module.zero_grad.__module__",
        show=False,
    )
    assert session.pull("value") == [0.0, 0.0]
    assert session.pull("names") == ("torch._tensor", "torch.nn.modules.module")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 2}, "--accumulate is the cell's own business with --manual; call backward"),
        ({"max_grad_norm": 1.0}, "--max-grad-norm is the cell's own business with --manual; clip"),
        ({"loss": "tokens"}, "--loss is the cell's own business with --manual; weigh"),
        ({"nan": "stop"}, "--nan is the cell's own business with --manual; call fsdp.stop()"),
    ],
)
def test_options_that_are_the_cells_business_are_refused(session, options, message):
    with pytest.raises(UsageError) as caught:
        session.train("1", manual=True, show=False, **options)
    assert message in str(caught.value)


def test_a_function_of_the_persons_under_a_name_that_a_cell_binds_is_back(session, capsys):
    session.model(NET + "loss = nn.CrossEntropyLoss()\nmetrics = {'old': 1}", show=False)
    with pytest.raises(CellFailedError) as caught:
        session.train("loss = loss(model(batch[0]), batch[1])", data="data", show=False)
    assert "`loss` is a name that this cell binds, so it is cleared" in str(caught.value)
    assert session.pull("type(loss).__name__") == "CrossEntropyLoss"
    session.train(LOSS, data="data")
    assert session.pull("type(loss).__name__, 'metrics' in globals()") == (
        "CrossEntropyLoss",
        False,
    )
    assert capsys.readouterr().err.count("`loss`") <= 1, "said once"
