"""Gradients and parameters of whole models that a person's cell writes, otherwise than usual."""

from __future__ import annotations

import pytest
import torch
from test_whole_models import NET

from fsdp_magic.errors import CellFailedError

MADE = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
STEPS = """
for step in range(3):
    rows = slice(16 * step + 8 * RANK, 16 * step + 8 * RANK + SIZE)
    optimizer.zero_grad()
    loss = (model(inputs[rows]) - targets[rows]).pow(2).mean()
"""
SCALER = """
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
scaler.step(optimizer)
"""
CLAMPED = """
loss.backward()
optimizer.step()
with torch.no_grad():
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.clamp_(-0.2, 0.2)
"""
HALVED = """
loss.backward()
for p in model.parameters():
    p.grad = None if p.grad is None else p.grad * 0.5
optimizer.step()
"""
SCALED_THEN_CLIPPED = """
loss.backward()
for group in optimizer.param_groups:
    for p in group["params"]:
        p.grad is None or p.grad.div_(8)
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
optimizer.step()
"""
ADDED_TO = """
loss.backward()
optimizer.param_groups[0]["params"][2].grad.mul_(0.5)
model(inputs[rows]).pow(2).mean().backward()
"""
ASSIGNED = """
used = [p for name, p in model.named_parameters() if not name.startswith(("spare", "right"))]
for p, gradient in zip(used, torch.autograd.grad(loss, used)):
    p.grad = gradient
optimizer.step()
"""


def _steps(update: str, *, rank: str, size: int) -> str:
    whole = STEPS.replace("RANK", rank).replace("SIZE", str(size))
    return whole + update.strip().join(["    ", "\n"]).replace("\n", "\n    ")


@pytest.mark.parametrize(
    ("update", "strategy"),
    [(SCALER, "zero1"), (CLAMPED, "zero1"), (HALVED, "ddp")],
    ids=["scaler", "clamped", "halved"],
)
def test_writes_reach_every_rank(session, update, strategy):
    reference: dict = {}
    exec(NET + MADE + _steps(update, rank="0", size=16), reference)
    torch.set_default_dtype(torch.float32)
    session.model(NET + MADE, strategy=strategy, show=False)
    session.run(_steps(update, rank="rank", size=8), show=False)
    for rank in (0, 1):
        for name, ours in session.pull("dict(model.named_parameters())", rank=rank).items():
            expected = reference["model"].get_parameter(name)
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("update", "strategy", "says"),
    [
        (SCALED_THEN_CLIPPED, "zero1", r"`model\.\w.*` was changed through an optimizer.*then as"),
        (
            ADDED_TO,
            "zero1",
            r"`model\.first\.weight` was changed.*backward would",
        ),
        (ASSIGNED, "zero1", r"not averaged over the ranks.*loss\.backward\(\)"),
        (ASSIGNED, "ddp", r"not averaged over the ranks.*loss\.backward\(\)"),
    ],
    ids=["scaled then clipped", "added to", "assigned, zero1", "assigned, ddp"],
)
def test_what_would_mix_ranks_is_refused(session, update, strategy, says):
    session.model(NET + MADE, strategy=strategy, show=False)
    before = session.pull("dict(model.named_parameters())")
    with pytest.raises(CellFailedError, match=says):
        session.run(_steps(update, rank="rank", size=8), show=False)
    for name, ours in session.pull("dict(model.named_parameters())").items():
        torch.testing.assert_close(ours, before[name], rtol=0, atol=0)
