"""fp16 scales its loss as a plain loop with torch's GradScaler does: same scale, same skips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from low_precision import DTYPES, SECOND_ORDER, built, cell, gradients, loss_in, roundings

from fsdp_magic.core.telemetry import SkippedSteps
from fsdp_magic.errors import CellFailedError
from fsdp_magic.notebook.session import Session

STRATEGIES = ("full_shard", "shard_grad_op", "ddp", "zero1")
GLOBAL_BATCH, LR, STEPS, INTERVAL = 16, 0.25, 12, 3
TOO_LARGE = (0, 1, 5, 9)
FACTORS = [2.0**20 if step in TOO_LARGE else 2.0**-5 for step in range(STEPS)]
"""Of the loss at each step: far more than fp16 holds at any scale here, or far less.

At the edge ranks may hold what one process does not: the sum over fewer samples is smaller.
"""
CELL = cell(1.0).replace("* 1.0", "* factors[step]")
ENGINE = "__import__('builtins')._fsdp_magic_call.__self__"
SHORT = f"{ENGINE}.scaler.set_growth_interval({INTERVAL})"
SCALE = f"{ENGINE}.scaler.get_scale()"


def plain_loop(
    *, steps: int = STEPS, max_norm: float | None = None
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Train in this process: losses, norms, scales after each step and learning rates."""
    names: dict[str, Any] = {}
    exec(built(lr=LR, momentum=0.5), names)
    model, optimizer = names["model"], names["optimizer"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    losses, norms, scales, rates = [], [], [], []
    for step in range(steps):
        part = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        loss = loss_in(names, torch.float16, part, FACTORS[step])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip = math.inf if max_norm is None else max_norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = optimizer.param_groups[0]["params"][0].detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not torch.equal(before, optimizer.param_groups[0]["params"][0]):
            scheduler.step()
        losses.append(loss.item())
        norms.append(norm.item())
        scales.append(scaler.get_scale())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, norms, scales, rates


def build(session: Session, *, strategy: str = "full_shard") -> None:
    code = built(lr=LR, momentum=0.5) + (
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)\n"
        f"scales, rates, factors = [], [], {FACTORS}\n"
        "def after():\n"
        f"    scales.append({SCALE})\n"
        "    rates.append(optimizer.param_groups[0]['lr'])\n"
    )
    session.model(code, strategy=strategy, precision="fp16", show=False)
    session.run(SHORT, show=False)


def train(session: Session, *, steps: int = STEPS, accumulate: int = 1, **options: Any) -> Any:
    return session.train(
        CELL, data="data", steps=steps, no_shuffle=True, accumulate=accumulate,
        micro_batch_size=GLOBAL_BATCH // (session.world_size * accumulate), after_step="after",
        **{"show": False, **options},
    )  # fmt: skip


def check(run: Any, session: Session, expected: Any) -> None:
    """Compare a run with the plain loop: steps and scales exactly, losses as fp16 allows."""
    losses, norms, scales, rates = expected
    assert [math.isfinite(norm) for norm in run.grad_norms] == [math.isfinite(n) for n in norms]
    assert session.pull("scales", rank="all") == [scales] * session.world_size
    # a skipped step moves no scheduler: the rates are those of the plain loop
    assert session.pull("rates") == pytest.approx(rates)
    assert run.losses == pytest.approx(losses, rel=STEPS * 2 * torch.finfo(torch.float16).eps)
    assert [n for n in run.grad_norms if math.isfinite(n)] == pytest.approx(
        [n for n in norms if math.isfinite(n)], rel=STEPS * 2 * torch.finfo(torch.float16).eps
    )


@pytest.mark.parametrize(
    ("strategy", "accumulate", "clip"),
    [
        ("full_shard", 1, None),
        ("zero1", 2, 0.5),
        pytest.param("shard_grad_op", 2, 0.5, marks=pytest.mark.nightly),
        pytest.param("ddp", 1, 0.5, marks=pytest.mark.nightly),
    ],
)
def test_it_skips_the_steps_and_takes_the_scales_of_a_plain_loop(
    session, strategy, accumulate, clip
):
    expected = plain_loop(max_norm=clip)
    assert [n for n, norm in enumerate(expected[1]) if not math.isfinite(norm)] == [*TOO_LARGE]
    assert expected[2][4] > expected[2][1], "the scale must grow again"
    build(session, strategy=strategy)
    run = train(session, accumulate=accumulate, max_grad_norm=clip)
    check(run, session, expected)
    assert run.steps == STEPS
    assert run.skipped == SkippedSteps(count=len(TOO_LARGE), scale=expected[2][TOO_LARGE[-1]])
    assert "4 steps were skipped by the fp16 scaler" in run.last_frame[1]


def test_the_scaler_goes_on_in_a_second_run_and_a_trial_leaves_it(session):
    build(session)
    first = train(session, steps=5)
    session.run("kept = list(scales)", show=False)
    train(session, steps=4, trial=True)
    session.run("scales, rates = kept, rates[:5]", show=False)
    second = train(session, steps=STEPS - 5)
    first_losses, *rest = plain_loop()
    assert first.losses + second.losses == pytest.approx(first_losses, rel=0.02)
    assert session.pull("scales", rank="all") == [rest[1]] * 2
    build(session)
    assert session.pull(SCALE) == 2.0**16


def test_a_failed_step_leaves_the_scaler_as_it_was(session):
    expected = plain_loop()
    build(session)
    session.run("armed = True", show=False)
    tripping = CELL + "if armed and step == 1 and rank == 1:\n    raise ValueError('no')\n"
    with pytest.raises(CellFailedError) as caught:
        session.train(
            tripping, data="data", steps=STEPS, no_shuffle=True, micro_batch_size=8,
            after_step="after", show=False,
        )  # fmt: skip
    done = caught.value.run.steps
    assert session.pull("scales", rank="all") == [expected[2][:done]] * 2
    train(session, steps=STEPS - done)
    assert session.pull("scales", rank="all") == [expected[2]] * 2


def test_a_step_that_ranks_do_not_agree_on_leaves_the_scaler_as_it_was(session):
    """It fails after its norm, which is not finite, is known."""
    build(session)
    session.run(
        "from fsdp_magic.engine import optimizer_state as file_\n"
        "whole_ = file_.make_missing\n"
        "def fails_(optimizers):\n"
        "    file_.make_missing = whole_\n"
        "    raise ValueError('no state')\n"
        "if rank == 1:\n    file_.make_missing = fails_",
        show=False,
    )
    with pytest.raises(CellFailedError, match="no state"):
        train(session)
    assert session.pull(SCALE, rank="all") == [2.0**16] * 2


def test_a_snapshot_holds_the_scaler(session):
    build(session)
    session.run(
        "def tear(*_):\n"
        "    if len(scales) == 10 and rank == 1:\n"
        "        raise ValueError('torn')\n"
        "optimizer.register_step_post_hook(tear)",
        show=False,
    )
    with pytest.raises(CellFailedError):
        train(session, snapshot_every=3)
    engine_scale, step = session.pull(f"{SCALE}, {ENGINE}.steps")
    expected = plain_loop()
    assert step == 9
    assert engine_scale == expected[2][8] != expected[2][9]


MANUAL = """
scaler = globals().get("scaler") or torch.amp.GradScaler(device.type, growth_interval=3)
x, y = batch
loss = (model(x) - y).pow(2).mean() * factors[step]
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()
scales.append(scaler.get_scale())
"""


@pytest.mark.parametrize(
    "strategy",
    ["full_shard", *(pytest.param(each, marks=pytest.mark.nightly) for each in STRATEGIES[1:])],
)
def test_a_manual_cell_uses_torchs_own_scaler(session, strategy):
    build(session, strategy=strategy)
    run = session.train(
        MANUAL, data="data", steps=STEPS, no_shuffle=True,
        micro_batch_size=8, manual=True, show=False,
    )  # fmt: skip
    _, _, scales, _ = plain_loop(max_norm=0.5)
    assert session.pull("scales", rank="all") == [scales] * 2
    assert run.steps == STEPS


MUTATIONS = {
    "not unscaled": "grad_scaler.Fp16Scaling.unscale = lambda self, parameters: None",
    "not scaled": "grad_scaler.Fp16Scaling.scale = lambda self, loss: loss",
    "scaled twice": """
def scale(self, loss, _o=grad_scaler.Fp16Scaling.scale):
    return _o(self, loss) * 2
grad_scaler.Fp16Scaling.scale = scale
""",
    "unscaled by this rank alone": """
def unscale(self, parameters, _o=grad_scaler.Fp16Scaling.unscale):
    if rank_ == 0:
        _o(self, parameters)
grad_scaler.Fp16Scaling.unscale = unscale
""",
    "nothing skipped": "grad_scaler.Fp16Scaling.skips = lambda self, norm: False",
    "the scale stays": "grad_scaler.Fp16Scaling.update = lambda self, norm: None",
}


@pytest.mark.parametrize(
    "mutation",
    [m if m == "not unscaled" else pytest.param(m, marks=pytest.mark.nightly) for m in MUTATIONS],
)
def test_a_wrong_scale_is_caught(session, mutation):
    session.run(
        "from fsdp_magic.engine import grad_scaler\n"
        "kept_ = dict(vars(grad_scaler.Fp16Scaling))\nrank_ = rank\n" + MUTATIONS[mutation],
        show=False,
    )
    try:
        build(session)
        with pytest.raises(AssertionError):
            check(train(session), session, plain_loop())
    finally:
        session.run(
            "for name in ('scale', 'unscale', 'skips', 'update'):\n"
            "    setattr(grad_scaler.Fp16Scaling, name, kept_[name])",
            show=False,
        )


def test_late_weights_are_scaled_too(session):
    """The gradient of one step, whose weights are known only after backward, within the bound."""
    session.model(built(lr=0.125), precision="fp16", show=False)
    before = session.pull("dict(model.named_parameters())")
    session.train(
        cell(0.125) + "loss_weight = len(x)\n", data="data", steps=1, no_shuffle=True,
        micro_batch_size=4, accumulate=2, show=False,
    )  # fmt: skip
    names: dict[str, Any] = {}
    exec(built(), names)
    # weights of 4 make the scaled gradients 4 times, and 16 in all, what they are in one backward
    options = {"factor": 0.125, "scale": 2.0**16}
    (whole,) = gradients(names, torch.float16, [slice(0, 16)], **options)
    cut = [slice(n, n + 4) for n in range(0, 16, 4)]
    parts = list(gradients(names, torch.float16, cut, **options))
    unit = torch.finfo(DTYPES["fp16"]).eps / 2
    for name, after in session.pull("dict(model.named_parameters())").items():
        ours = (before[name] - after) / 0.125
        bound = roundings(name) * unit * (sum(p[name].abs() for p in parts) + whole[name].abs())
        bound = bound * SECOND_ORDER + 5e-7 * before[name].abs() / 0.125
        assert ((ours - whole[name]).abs() <= bound).all(), name
