"""Under ``ddp`` and ``zero1`` the model stays the person's, and trains as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from coverings import pairwise
from equality import GPT2, GPT2_CELL, PLAIN, PLAIN_CELL, Case, assert_equal, single_process
from equality import on_engines as case_on_engines
from programs import Program, in_one_process, on_engines
from whole_models import SMALL_BUCKETS, changed

from fsdp_magic.errors import CellFailedError

STRATEGIES = ("ddp", "zero1")
NET = """
import torch
import torch.nn as nn
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.left, self.right = nn.Linear(9, 9), nn.Linear(9, 9)
        self.spare = nn.Linear(9, 9)  # used nowhere: must not be decayed
        self.last = nn.Linear(9, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))  # fewer rows than ranks

    def forward(self, x, part="left"):
        x = torch.tanh(self.first(x))
        return self.last(x + getattr(self, part)(x)) * self.scale + self.one

model = Net()
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(192, 6, generator=generator)
targets = torch.randn(192, 2, generator=generator)
data = list(zip(inputs, targets))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
torch.set_default_dtype(torch.float32)
"""
CELLS = {
    "a part used on one rank": """
out = model(x, "left" if rank == 0 else "right")
loss = (out - y).pow(2).mean()
""",
    "a part used in one step": """
out = model(x, "left" if step % 2 else "right")
loss = (out - y).pow(2).mean()
""",
    "a part used in one micro-step": """
out = model(x, "left" if micro_step == 0 else "right")
loss = (out - y).pow(2).mean()
""",
    "reentrant checkpoints": """
from torch.utils.checkpoint import checkpoint
h = torch.tanh(model.first(x))
for _ in range(3):
    h = h + checkpoint(model.left, h, use_reentrant=True)
loss = (model.last(model.left(h)) - y).pow(2).mean()
""",
    "frozen in between": """
model.left.requires_grad_(step not in (2, 3))
loss = (model(x) - y).pow(2).mean()
""",
}


@pairwise(cell=CELLS, strategy=STRATEGIES, accumulate=[1, 2])
def test_ranks_may_use_different_parts(session, cell, strategy, accumulate):
    program = Program(built=NET, cell="x, y = batch" + CELLS[cell])
    with changed(session, SMALL_BUCKETS):
        measured = on_engines(session, program, strategy=strategy, accumulate=accumulate)
    assert_equal(measured, in_one_process(program, accumulate=accumulate), tolerance=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["plain", pytest.param("gpt2", marks=pytest.mark.nightly)])
def test_buckets_of_any_size_add_up_to_the_same(session, strategy, model):
    code, cell = {"gpt2": (GPT2, GPT2_CELL), "plain": (PLAIN, PLAIN_CELL)}[model]
    case = Case(model=code, cell=cell)
    with changed(session, SMALL_BUCKETS):
        measured = case_on_engines(session, case, accumulate=2, strategy=strategy)
    assert_equal(measured, single_process(case), tolerance=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_model_stays_the_persons(session, strategy):
    session.model(
        NET + "model.config = {'a': 1}\nmodel.left.weight.no_decay = True\n"
        "before = model, type(model), list(model.parameters())",
        "model",
        strategy=strategy,
        show=False,
    )
    assert session.pull(
        "model is before[0] and type(model) is Net is before[1] and model.config == {'a': 1}"
    )
    assert session.pull(
        "all(p is q and type(p) is nn.Parameter for p, q in zip(model.parameters(), before[2]))"
    )
    placement = session.shards(show=False)
    assert {p.kind for p in placement.parameters} == {"replicated"}
    assert placement.local_bytes == (placement.global_bytes,) * 2
    session.run(
        "held = [p for g in optimizer.param_groups for p in g['params']]\n"
        "marks = [hasattr(p, 'no_decay') for p in held].count(True)",
        show=False,
    )
    assert session.pull("marks") == 1
    with pytest.raises(CellFailedError, match="hook that runs when its gradient is there"):
        session.model(
            "other = nn.Linear(2, 2)\n"
            "other.weight.register_post_accumulate_grad_hook(lambda p: None)",
            strategy=strategy,
            show=False,
        )
    (note,) = session.model(
        "other = nn.Linear(2, 2)", strategy=strategy, accumulate_sync="every", show=False
    ).notes
    assert "reduced once a step" in note


def test_gradients_are_reduced_while_backward_runs(session):
    """From the second step on; the first one sees in what order gradients arrive."""
    session.model(NET, strategy="ddp", show=False)
    session.run(
        "from fsdp_magic.engine.parallel.gradient_buckets import GradientReduction as R\n"
        "seen, finish = [], R.finish\n"
        "def watched(self):\n    seen.append(self._launched)\n    finish(self)\n"
        "R.finish = watched",
        show=False,
    )
    try:
        with changed(session, SMALL_BUCKETS):
            cell = "x, y = batch\nloss = (model(x) - y).pow(2).mean()"
            session.train(cell, data="data", steps=3, show=False)
    finally:
        session.run("R.finish = finish", show=False)
    first, *later = session.pull("seen")
    assert first == 0
    assert all(launched > 0 for launched in later)


PLAIN_STEPS = {
    "by the optimizer": "optimizer.zero_grad()",
    "by the optimizer, to zero": "optimizer.zero_grad(set_to_none=False)",
    "by the module": "model.zero_grad()",
    "by hand, as optimizers hold them": """
for group in optimizer.param_groups:
    for p in group["params"]:
        p.grad = None
""",
    "by hand, as the module has them": "for p in model.parameters():\n    p.grad = None",
}


@pairwise(clearing=PLAIN_STEPS, strategy=STRATEGIES, late=[False, True])
def test_plain_cells_train_as_one_process(session, clearing, strategy, late):
    """Backward, clipping, step and clearing are the person's, in ``%%fsdp`` cells."""
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
    steps = f"""
for step in range(4):
    for half in range(2):
        first = 32 * step + 16 * half + 8 * RANK
        x, y = inputs[first : first + 8], targets[first : first + 8]
        (model(x, "left" if RANK == 0 else "right") - y).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    {PLAIN_STEPS[clearing].strip().replace(chr(10), chr(10) + "    ")}
"""
    reference: dict = {}
    exec(NET + made, reference)
    torch.set_default_dtype(torch.float32)
    model, x, y = (reference[name] for name in ("model", "inputs", "targets"))
    for step in range(4):
        for first in range(32 * step, 32 * step + 32, 8):
            part = "right" if first // 8 % 2 else "left"
            rows = slice(first, first + 8)
            ((model(x[rows], part) - y[rows]).pow(2).mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference["optimizer"].step()
        model.zero_grad()
    session.model(NET if late else NET + made, strategy=strategy, show=False)
    session.run((made if late else "") + steps.replace("RANK", "rank"), show=False)
    for rank in (0, 1):
        for name, ours in session.pull("dict(model.named_parameters())", rank=rank).items():
            torch.testing.assert_close(ours, model.get_parameter(name), rtol=1e-9, atol=1e-12)


def test_a_gathering_that_failed_on_one_rank_is_made_up_for(session):
    """All ranks have stepped by then, and hold each other's rows from before."""
    cell = "x, y = batch\nloss = (model(x) - y).pow(2).mean()"
    options = {"data": "data", "no_shuffle": True, "show": False}
    session.model(NET, strategy="zero1", show=False)
    session.train(cell, steps=3, **options)
    expected = session.pull("dict(model.named_parameters())")
    session.model(NET, strategy="zero1", show=False)
    fails = """
def gather(parameters, _o=_z.gather_rows, **rest):
    if engine.world.rank == 1 and engine.steps == 0 and step_now() == 2:
        raise RuntimeError("gathering failed")
    _o(parameters, **rest)
_z.gather_rows = gather
step_now = lambda: engine.names.namespace.get("step")
engine = __import__("builtins")._fsdp_magic_call.__self__
"""
    with changed(session, fails), pytest.raises(CellFailedError, match="gathering failed"):
        session.train(cell, steps=3, **options)
    for rank in (0, 1):
        for name, ours in session.pull("dict(model.named_parameters())", rank=rank).items():
            torch.testing.assert_close(ours, expected[name], rtol=0, atol=0)


def test_a_parameter_that_was_given_another_tensor_is_trained(session):
    given = "for p in model.parameters():\n    p.data = p.data * 0.5\n"
    cell = "x, y = batch\nloss = (model(x) - y).pow(2).mean()"
    session.model(NET, strategy="zero1", show=False)
    session.run(given, show=False)
    options = {"data": "data", "steps": 3, "no_shuffle": True, "show": False}
    run = session.train(cell, **options)
    session.model(NET, strategy="ddp", show=False)
    session.run(given, show=False)
    assert run.losses == pytest.approx(session.train(cell, **options).losses, rel=1e-12)


def test_state_is_in_shards_under_zero1(session):
    session.model(NET, strategy="zero1", show=False)
    session.train("x, y = batch\nloss = (model(x) - y).pow(2).mean()", data="data", show=False)
    rows = session.pull(
        "sum(s.to_local().numel() if hasattr(s, 'to_local') else s.numel()\n"
        "    for state in optimizer.state.values() for s in state.values())",
        rank="all",
    )
    whole = session.pull("sum(p.numel() for p in model.parameters() if p.ndim)")
    spare = 9 * 9 + 9 + 9 * 9 + 9  # the spare part and the right one have no gradient
    assert sum(rows) == whole - spare + 2  # the scalar's is on both


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_is_gone_is_freed(session, strategy):
    session.model(NET, "model", strategy=strategy, show=False)
    cell = "x, y = batch\nloss = (model(x) - y).pow(2).mean()"
    session.train(cell, data="data", steps=1, show=False)
    session.run(
        "import gc, weakref\nweak = weakref.ref(model), weakref.ref(model.first.weight)\n"
        "del model, optimizer, loss\ngc.collect()\nleft = [w() is None for w in weak]",
        show=False,
    )
    assert session.pull("left", rank="all") == [[True, True]] * 2


def test_adafactor_needs_whole_parameters(session):
    made = "optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)\n"
    cell = "x, y = batch\nloss = (model(x) - y).pow(2).mean()"
    program = Program(built=NET + made, cell=cell)
    measured = on_engines(session, program, strategy="ddp")
    assert_equal(measured, in_one_process(program), tolerance=1e-7)
    session.model(NET + made, strategy="zero1", show=False)
    with pytest.raises(CellFailedError, match="Adafactor"):
        session.train(cell, data="data", show=False)


def test_lbfgs_works_under_zero1(session):
    made = "optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)\n"
    cell = """
def closure():
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    return loss
loss = optimizer.step(closure)
"""
    session.model(NET + made, strategy="zero1", show=False)
    options = {"data": "data", "steps": 3, "micro_batch_size": 8, "no_shuffle": True}
    run = session.train(cell, manual=True, show=False, **options)
    names: dict = {}
    exec(NET + made, names)
    torch.set_default_dtype(torch.float32)
    for step, ours in enumerate(run.losses):
        rows = slice(16 * step, 16 * step + 16)

        def closure(rows=rows):
            names["optimizer"].zero_grad()
            loss = F.mse_loss(names["model"](names["inputs"][rows]), names["targets"][rows])
            loss.backward()
            return loss

        assert abs(names["optimizer"].step(closure).item() - ours) < 1e-9
