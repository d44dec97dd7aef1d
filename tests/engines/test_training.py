"""Training runs: what fails, what is found, what continues."""

from __future__ import annotations

import pytest
import torch
from equality import (
    GPT2,
    GPT2_CELL,
    PLAIN,
    PLAIN_CELL,
    SGD,
    Case,
    Trajectory,
    assert_equal,
    single_process,
)
from interrupting import interrupted_after, stop_pressed

from fsdp_magic.errors import CellFailedError, CellInterrupted
from fsdp_magic.notebook.session import Session

CASE = Case()
OPTIONS = {
    "data": "data", "no_shuffle": True, "micro_batch_size": 4, "accumulate": 2, "show": False,
}  # fmt: skip

BOOM = """
class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("boom in backward")
"""
FAILING_CELL = """
if step == 3 and rank == 1 and micro_step == 1:
    def boom(module, args, out):
        return Boom.apply(out) if torch.is_tensor(out) else (Boom.apply(out[0]), *out[1:])
    handle = model.transformer.h[0].register_forward_hook(boom)
    logits = model(input_ids=batch).logits
    handle.remove()
else:
    logits = model(input_ids=batch).logits
loss = F.cross_entropy(logits[:, :-1].reshape(-1, 53), batch[:, 1:].reshape(-1))
"""


def trained_around_a_failure(session: Session) -> Trajectory:
    """Train three steps, fail in the backward of the fourth, between blocks; train the rest."""
    session.model(CASE.built + BOOM, show=False)
    before = session.pull("dict(model.named_parameters())")
    with pytest.raises(CellFailedError) as caught:
        session.train(FAILING_CELL, steps=6, **OPTIONS)
    first = caught.value.run
    assert (first.state, first.steps) == ("failed", 3)
    second = session.train(CASE.cell, steps=3, **OPTIONS)
    return Trajectory(
        losses=first.losses + second.losses,
        grad_norms=first.grad_norms + second.grad_norms,
        before=before,
        after=session.pull("dict(model.named_parameters())"),
    )


def test_a_failed_backward_between_blocks_equals_one_process(session):
    assert_equal(trained_around_a_failure(session), single_process(CASE), tolerance=1e-9)


def test_without_the_reset_a_failed_backward_leaves_a_trace(session):
    session.run(
        "from fsdp_magic.engine.parallel import torch_private\n"
        "_forget = torch_private.forget_iteration\n"
        "def half(model):  # what torch's own reset does, which keeps gradients on their way\n"
        "    for _, unit in torch_private.units(model):\n"
        "        for group in torch_private.parameter_groups(unit):\n"
        "            group._all_gather_result = None\n"
        "    torch_private._reset_iteration_state(model)\n"
        "torch_private.forget_iteration = half",
        show=False,
    )
    try:
        measured = trained_around_a_failure(session)
        with pytest.raises(AssertionError):
            assert_equal(measured, single_process(CASE), tolerance=1e-9)
    finally:
        session.run("torch_private.forget_iteration = _forget", show=False)


def test_a_failure_in_a_plain_cell_with_a_sharded_model_leaves_no_trace(session):
    session.model(CASE.built + BOOM, show=False)
    before = session.pull("dict(model.named_parameters())")
    first = session.train(CASE.cell, steps=3, **OPTIONS)
    with pytest.raises(CellFailedError, match="boom in backward"):
        session.run(
            "batch = torch.stack(data[:4])\n"
            "out = model(input_ids=batch).logits.sum()\n"
            "if rank == 1:\n    out = Boom.apply(out)\n"
            "out.backward()"
        )
    second = session.train(CASE.cell, steps=3, **OPTIONS)
    measured = Trajectory(
        losses=first.losses + second.losses,
        grad_norms=first.grad_norms + second.grad_norms,
        before=before,
        after=session.pull("dict(model.named_parameters())"),
    )
    assert_equal(measured, single_process(CASE), tolerance=1e-9)


def test_an_error_inside_the_optimizer_step_says_so(session):
    session.model(CASE.built, show=False)
    session.run(
        "def broken(*args, **kwargs):\n    raise RuntimeError('broken optimizer')\n"
        "if rank == 1:\n    optimizer.register_step_pre_hook(broken)",
        show=False,
    )
    with pytest.raises(CellFailedError, match="broken optimizer") as caught:
        session.train(CASE.cell, steps=2, **OPTIONS)
    assert "optimizer step itself" in str(caught.value)


# -- optimizers


def test_an_optimizer_made_in_an_earlier_cell_trains_the_shards(session):
    session.run(CASE.built, show=False)
    session.model("pass", "model", show=False)
    before = session.pull("dict(model.named_parameters())")
    run = session.train(CASE.cell, steps=6, **OPTIONS)
    after = session.pull("dict(model.named_parameters())")
    measured = Trajectory(losses=run.losses, grad_norms=run.grad_norms, before=before, after=after)
    assert_equal(measured, single_process(CASE), tolerance=1e-9)


@pytest.mark.parametrize("same_cell", [True, False])
def test_an_optimizer_made_after_a_forward_trains_the_shards(session, same_cell):
    """pytorch#149205: it holds the gathered parameters of that forward."""
    session.model(GPT2.replace("DTYPE", "torch.float64"), show=False)
    before = session.pull("dict(model.named_parameters())")
    forward = "model(input_ids=torch.stack(data[:2]))\n"
    optimizer = SGD.replace("LR", "0.1")
    for cell in [forward + optimizer] if same_cell else [forward, optimizer]:
        session.run(cell, show=False)
    session.run("import torch.nn.functional as F", show=False)
    run = session.train(CASE.cell, steps=6, **OPTIONS)
    after = session.pull("dict(model.named_parameters())")
    measured = Trajectory(losses=run.losses, grad_norms=run.grad_norms, before=before, after=after)
    assert_equal(measured, single_process(CASE), tolerance=1e-9)


def test_state_of_an_optimizer_that_has_stepped_before_sharding_is_kept(session):
    """Momentum from steps of one process goes on after sharding."""
    session.run(
        CASE.built + "for step_ in range(3):\n"
        "    batch_ = torch.stack(data[step_ * 16:(step_ + 1) * 16])\n"
        "    logits = model(input_ids=batch_).logits\n"
        "    loss_ = F.cross_entropy(logits[:, :-1].reshape(-1, 53), batch_[:, 1:].reshape(-1))\n"
        "    optimizer.zero_grad(); loss_.backward(); optimizer.step()\n"
        "data = data[48:]",
        show=False,
    )
    session.model("pass", "model", show=False)
    run = session.train(CASE.cell, steps=3, **OPTIONS)
    reference = single_process(CASE)
    span = max(reference.losses) - min(reference.losses)
    for ours, theirs in zip(run.losses, reference.losses[3:], strict=True):
        assert abs(ours - theirs) < 1e-9 * span


def test_a_parameter_in_two_optimizers_is_refused_with_both_names(session):
    session.model(CASE.built + "second = torch.optim.SGD(model.parameters(), lr=0.1)", show=False)
    with pytest.raises(CellFailedError, match="two optimizers") as caught:
        session.train(CASE.cell, steps=1, **OPTIONS)
    assert "optimizer" in str(caught.value)
    assert "second" in str(caught.value)


def test_no_optimizer_is_one_clear_line(session):
    session.model(GPT2.replace("DTYPE", "torch.float64"), show=False)
    with pytest.raises(CellFailedError, match="no optimizer is bound"):
        session.train(CASE.cell, steps=1, **OPTIONS)


# -- models


def test_the_sharding_cell_run_twice_shards_a_fresh_model(session):
    for _ in range(2):
        placement = session.model(CASE.built, show=False)
        assert all(p.kind == "sharded" for p in placement.parameters)
        run = session.train(CASE.cell, steps=6, **OPTIONS)
        reference = single_process(CASE)
        assert abs(run.losses[-1] - reference.losses[-1]) < 1e-9
    assert session.status(show=False)[0].models == ("model",)


def test_a_sharded_model_is_left_alone_and_said_so(session, capsys):
    session.model(CASE.built, show=False)
    session.train(CASE.cell, steps=2, **OPTIONS)
    weight = session.pull("model.lm_head.weight")
    session.model("model = model", show=True)
    assert "sharded already and is left alone" in capsys.readouterr().out
    assert bool((session.pull("model.lm_head.weight") == weight).all())


def test_another_name_of_a_sharded_model_is_known(session):
    session.model(CASE.built, show=False)
    assert session.model("other = model", show=False).model == "model"


def test_a_model_that_other_code_sharded_is_refused(session):
    with pytest.raises(CellFailedError, match="sharded by other code"):
        session.model(
            CASE.built + "from torch.distributed.fsdp import fully_shard\nfully_shard(model)",
            show=False,
        )


def test_blocks_are_units_and_every_rank_holds_its_rows(session):
    placement = session.model(CASE.built, show=False)
    units = {p.unit for p in placement.parameters}
    assert units == {"", "transformer.h.0", "transformer.h.1"}
    for rank in range(2):
        shapes = dict(
            session.pull(
                "[(n, tuple(p.to_local().shape)) for n, p in model.named_parameters()]", rank=rank
            )
        )
        assert {p.name: p.local_shapes[rank] for p in placement.parameters} == shapes


def test_a_model_that_was_never_sharded_is_sharded_and_said_so(session):
    session.run(CASE.built, show=False)
    run = session.train(CASE.cell, steps=6, **OPTIONS)
    assert any("had not been sharded" in note for note in run.notes)
    assert abs(run.losses[-1] - single_process(CASE).losses[-1]) < 1e-9


def test_ranks_that_built_different_weights_get_those_of_rank_0(session):
    placement = session.model(
        CASE.built + "with torch.no_grad():\n    model.lm_head.weight.add_(rank)", show=False
    )
    assert any("rank 0's weights" in note for note in placement.notes)
    run = session.train(CASE.cell, steps=6, **OPTIONS)
    assert abs(run.losses[-1] - single_process(CASE).losses[-1]) < 1e-9


def test_a_scalar_parameter_is_kept_whole(session):
    placement = session.model(Case(model=PLAIN, cell=PLAIN_CELL).built, show=False)
    kinds = {p.name: p.kind for p in placement.parameters}
    assert kinds["scale"] == "replicated"
    assert kinds["first.weight"] == "sharded"


def test_a_cell_without_a_module_is_one_clear_line(session):
    with pytest.raises(CellFailedError, match="binds no module with parameters"):
        session.model("x = 1", show=False)


SLOTS = """
class Pair:
    __slots__ = ("first", "second")

pair = Pair()
pair.first = model
torch.manual_seed(7)
pair.second = Net().to(torch.float64)
del model
optimizer = torch.optim.SGD([*pair.first.parameters(), *pair.second.parameters()], lr=0.1)
"""


def test_models_that_no_plain_name_leads_to_are_trained_as_one_process_would(session):
    code = Case(model=PLAIN, cell=PLAIN_CELL, optimizer=SLOTS).built
    session.model(code, ("pair.first", "pair.second"), show=False)
    cell = "x, y = batch\nloss = (pair.first(x) * pair.second(x) - y).pow(2).mean()"
    run = session.train(cell, steps=3, **OPTIONS)
    names: dict = {}
    exec(code, names)
    pair, data, optimizer = names["pair"], names["data"], names["optimizer"]
    for step, norm in enumerate(run.grad_norms):
        x, y = map(torch.stack, zip(*data[step * 16 : (step + 1) * 16], strict=True))
        optimizer.zero_grad()
        (pair.first(x) * pair.second(x) - y).pow(2).mean().backward()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        expected = torch.sqrt(sum(g.pow(2).sum() for g in gradients)).item()
        assert norm == pytest.approx(expected, rel=1e-9)
        optimizer.step()


@pytest.mark.parametrize(
    ("container", "names"),
    [
        ("nn.ModuleDict({'a': Net().double(), 'b': Net().double()})", ("nets['a']", "nets['b']")),
        ("nn.ModuleList([Net().double(), Net().double()])", ("nets[0]", "nets[1]")),
    ],
)
def test_a_container_without_forward_is_sharded_by_what_is_in_it(session, container, names):
    code = PLAIN.replace("DTYPE", "torch.float64").replace("model = Net", "unused = Net")
    placement = session.model(
        code + f"del unused\nnets = {container}\n"
        "optimizer = torch.optim.SGD(nets.parameters(), lr=0.1)",
        show=False,
    )
    assert session.status(show=False)[0].models == names
    assert placement.model == names[-1]
    key = names[0].removeprefix("nets")
    cell = f"x, y = batch\nloss = (nets{key}(x) - y).pow(2).mean()"
    before = session.pull(f"nets{key}.first.weight")
    assert session.train(cell, steps=1, **OPTIONS).state == "done"
    assert not torch.equal(before, session.pull(f"nets{key}.first.weight"))


def test_whole_parameters_without_a_gradient_are_left_alone(session):
    """AdamW would let a zero gradient decay them; a frozen or unused one has none."""
    code = PLAIN.replace("DTYPE", "torch.float64").replace("* self.scale", "")
    session.model(
        code + "frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)\n"
        "optimizer = torch.optim.AdamW([*model.parameters(), frozen], lr=0.1)",
        show=False,
    )
    session.train(PLAIN_CELL, steps=2, **OPTIONS)
    assert session.pull("model.scale").item() == 1.5
    assert session.pull("frozen").tolist() == [1.0, 1.0]


def test_a_block_called_before_the_model_costs_nothing(session):
    session.model(CASE.built, show=False)
    session.run("model.transformer.h[1](torch.zeros(1, 3, 32, dtype=torch.float64))", show=False)
    run = session.train(CASE.cell, steps=6, **OPTIONS)
    assert abs(run.losses[-1] - single_process(CASE).losses[-1]) < 1e-9


@pytest.mark.parametrize(
    "difference", ["nn.Linear(3, 3 + rank)", "nn.Linear(3, 3, bias=rank == 0)"]
)
def test_ranks_that_build_models_of_other_shape_are_told_the_first_difference(session, difference):
    with pytest.raises(CellFailedError, match="built model differently: rank 0 has"):
        session.model(f"from torch import nn\nmodel = {difference}", show=False)


def test_a_loss_made_of_shards_is_refused(session):
    session.model(CASE.built, show=False)
    cell = "loss = sum(p.pow(2).sum() for p in model.parameters() if p.ndim > 1)"
    with pytest.raises(CellFailedError, match="made of sharded parameters"):
        session.train(cell, steps=1, **OPTIONS)


# -- the cell


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("logits = 1", "binds no `loss`"),
        ("loss = 1.0", "is a float"),
        ("loss = torch.ones(2, requires_grad=True)", r"has shape \(2,\)"),
        ("loss = torch.ones(())", "does not require grad"),
        ("%time\nloss = 1", "uses a magic"),
        ("import asyncio\nawait asyncio.sleep(0)", "awaits at top level"),
    ],
)
def test_a_cell_that_cannot_train_is_refused_in_one_line(session, cell, words):
    session.model(CASE.built, show=False)
    with pytest.raises(CellFailedError, match=words):
        session.train(cell, steps=1, **OPTIONS)
    assert session.train(CASE.cell, steps=1, **OPTIONS).state == "done"


def test_a_cell_finds_its_names_and_leaves_the_persons_own(session):
    session.model(CASE.built, show=False)
    session.run("seen = []\nstep = 'mine'", show=False)
    session.train(
        "seen.append((step, micro_step, epoch, micro_batch_size, total_steps, len(batch)))\n"
        + GPT2_CELL,
        steps=2,
        **OPTIONS,
    )
    assert session.pull("seen") == [(s, m, 0, 4, 2, 4) for s in range(2) for m in range(2)]
    assert session.pull("step") == "mine"


def test_a_second_run_continues_steps_and_data(session):
    session.model(CASE.built, show=False)
    session.run("seen = []", show=False)
    cell = "seen.append((step, epoch))\n" + GPT2_CELL
    for _ in range(2):
        session.train(cell, steps=4, **OPTIONS)
    # 96 samples are six steps of sixteen; every step has two micro-steps
    steps = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1), (7, 1)]
    assert session.pull("seen") == [entry for entry in steps for _ in range(2)]


# -- stopping


def test_an_interrupt_stops_all_ranks_after_the_same_step(session):
    session.model(CASE.built, show=False)
    session.run("import time", show=False)
    cell = f"time.sleep(0.02)\n{stop_pressed('step == 3')}{CASE.cell}"
    with interrupted_after(), pytest.raises(CellInterrupted) as caught:
        session.train(cell, steps=1000, **OPTIONS)
    run = caught.value.run
    assert run.state == "stopped"
    assert run is session.runs[-1]
    assert 0 < run.steps < 1000
    assert {len(rank.losses) for rank in run.ranks} == {run.steps}
    assert [status.steps for status in session.status(show=False)] == [run.steps] * 2


def test_a_second_interrupt_ends_a_stuck_step(session):
    session.model(CASE.built, show=False)
    session.run("import time", show=False)
    stuck = stop_pressed("step == 1", 0.6, then="time.sleep(60)")
    with interrupted_after(), pytest.raises(CellInterrupted) as caught:
        session.train(stuck + CASE.cell, steps=9, **OPTIONS)
    assert caught.value.run.steps == 1
    assert session.train(CASE.cell, steps=1, **OPTIONS).state == "done"


# -- watching


def test_watching_a_run_does_not_disturb_it(session):
    """The service thread once read ``p.grad``, which corrupts the heap on torch 2.13.

    Published a thousand times as often as usual, that ended an engine within thirty steps.
    """
    session.model(CASE.built, show=False)
    session.run(
        "from fsdp_magic.engine import service, time_share, training\n"
        "training._PUBLISH_SECONDS = training._SAMPLE_SECONDS = 0.0\n"
        "time_share.SHARE = 1.0\n"
        "service._WATCH_SECONDS = 0.001",
        show=False,
    )
    try:
        run = session.train(CASE.cell, steps=40, **OPTIONS)
    finally:
        session.run(
            "training._PUBLISH_SECONDS, training._SAMPLE_SECONDS = 0.4, 0.1\n"
            "time_share.SHARE = 0.003\n"
            "service._WATCH_SECONDS = 0.02",
            show=False,
        )
    assert run.state == "done"
    assert run.steps == 40


def test_memory_is_told_by_its_parts(session):
    session.model(CASE.built, show=False)
    run = session.train(CASE.cell, steps=3, **OPTIONS)
    held = sum(p.local_bytes[0] for p in session.shards(show=False).parameters)
    peak = run.ranks[0].peak_memory
    assert peak.parameter_bytes == held
    assert run.ranks[0].memory.optimizer_bytes == held  # momentum, one number a parameter
    assert run.ranks[0].memory.gradient_bytes == 0
    parts = (
        peak.parameter_bytes + peak.gradient_bytes + peak.optimizer_bytes
        + peak.activation_bytes + peak.cache_bytes + peak.other_bytes
    )  # fmt: skip
    assert parts == peak.used_bytes
    assert peak.peak_allocated_bytes >= peak.allocated_bytes
    now = session.status(show=False)[0].memory
    assert (now.parameter_bytes, now.optimizer_bytes) == (held, held)
