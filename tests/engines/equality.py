"""What the equality and the mutation tests share: cases, and the comparison.

A case is a model, its optimizer, data and a cell, as code that runs on the engines. The plain
single-process loop that it must equal stands in ``single_process`` below: it knows nothing of
the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fsdp_magic.notebook.session import Session

GLOBAL_BATCH = 16
STEPS = 6

PLAIN = """
import torch
import torch.nn as nn

torch.manual_seed(1)

def block():
    return nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 24)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.last = nn.Linear(24, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))  # a scalar, which FSDP2 cannot cut

    def forward(self, x):
        x = self.first(x)
        for each in self.blocks:
            x = x + each(x)
        return self.last(x) * self.scale

model = Net().to(DTYPE)
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(96, 10, generator=generator, dtype=DTYPE)
targets = torch.randn(96, 3, generator=generator, dtype=DTYPE)
data = list(zip(inputs, targets))
"""
PLAIN_CELL = """
x, y = batch
loss = (model(x) - y).pow(2).mean()
"""

GPT2 = """
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(1)
config = GPT2Config(
    n_layer=2, n_head=2, n_embd=32, vocab_size=53, n_positions=16,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)
model = GPT2LMHeadModel(config).to(DTYPE).train()
generator = torch.Generator().manual_seed(2)
data = list(torch.randint(0, 53, (96, 12), generator=generator))
"""
# transformers computes the loss in float32, so the cell takes it from the logits
GPT2_CELL = """
logits = model(input_ids=batch).logits
loss = F.cross_entropy(logits[:, :-1].reshape(-1, 53), batch[:, 1:].reshape(-1))
"""

GROUPS = """
matrices = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
groups = [
    {"params": matrices, "weight_decay": 0.1},
    {"params": others, "weight_decay": 0.0, "lr": LR / 2},
]
"""
SGD = GROUPS + "optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)\n"
ADAMW = GROUPS + "optimizer = torch.optim.AdamW(groups, lr=LR)\n"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training program."""

    model: str = GPT2
    cell: str = GPT2_CELL
    optimizer: str = SGD
    lr: float = 0.1
    dtype: str = "float64"
    max_grad_norm: float | None = None

    @property
    def built(self) -> str:
        """The code that builds it."""
        code = self.model + self.optimizer
        return code.replace("DTYPE", f"torch.{self.dtype}").replace("LR", repr(self.lr))


@dataclass(kw_only=True)
class Trajectory:
    """What a run left behind."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)


def single_process(case: Case) -> Trajectory:
    """Train in this process with a plain loop over the whole global batch."""
    names: dict[str, Any] = {}
    exec(case.built, names)
    model, optimizer, data = names["model"], names["optimizer"], names["data"]
    trajectory = Trajectory(before=_weights(model))
    for step in range(STEPS):
        samples = data[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        if isinstance(samples[0], tuple):
            x = torch.stack([sample[0] for sample in samples])
            y = torch.stack([sample[1] for sample in samples])
            loss = (model(x) - y).pow(2).mean()
        else:
            batch = torch.stack(samples)
            logits = model(input_ids=batch).logits
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, 53), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.sqrt(sum(g.pow(2).sum() for g in gradients))
        if case.max_grad_norm is not None and norm > case.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(case.max_grad_norm / (norm + 1e-6))
        optimizer.step()
        trajectory.losses.append(loss.item())
        trajectory.grad_norms.append(norm.item())
    trajectory.after = _weights(model)
    return trajectory


def on_engines(
    session: Session,
    case: Case,
    *,
    accumulate: int = 1,
    strategy: str = "full_shard",
    data: str = "data",
    **options: Any,
) -> Trajectory:
    """Train on the engines of a session.

    Args:
        session: with what is on them.
        case: what is trained.
        accumulate: micro-steps.
        strategy: how the model is spread.
        data: what the case's samples are bound to.
        **options: of the model.
    """
    session.model(case.built, strategy=strategy, show=False, **options)
    trajectory = Trajectory(before=session.pull("dict(model.named_parameters())"))
    run = session.train(
        case.cell,
        data=data,
        steps=STEPS,
        no_shuffle=True,
        micro_batch_size=GLOBAL_BATCH // (session.world_size * accumulate),
        accumulate=accumulate,
        max_grad_norm=case.max_grad_norm,
        show=False,
    )
    trajectory.losses, trajectory.grad_norms = run.losses, run.grad_norms
    trajectory.after = session.pull("dict(model.named_parameters())")
    return trajectory


def assert_equal(measured: Trajectory, reference: Trajectory, *, tolerance: float) -> None:
    """Compare losses, every gradient norm and the final weights.

    The tolerance is relative: of losses, to how far the loss moved; of weights, to how far the
    parameter that moved most did.
    """
    assert len(measured.losses) == len(reference.losses) == STEPS
    span = max(reference.losses) - min(reference.losses)
    for step, (ours, theirs) in enumerate(zip(measured.losses, reference.losses, strict=True)):
        assert abs(ours - theirs) <= tolerance * span, f"loss of step {step}: {ours} != {theirs}"
    for step, (ours, theirs) in enumerate(
        zip(measured.grad_norms, reference.grad_norms, strict=True)
    ):
        assert abs(ours - theirs) <= tolerance * theirs, f"norm of step {step}: {ours} != {theirs}"
    assert measured.after.keys() == reference.after.keys()
    moved = max(
        (reference.after[name] - reference.before[name]).abs().max().item()
        for name in reference.after
    )
    assert moved > 0
    for name, theirs in reference.after.items():
        torch.testing.assert_close(measured.before[name], reference.before[name], rtol=0, atol=0)
        distance = (measured.after[name] - theirs).abs().max().item()
        assert distance <= tolerance * moved, f"{name} is off by {distance:.3g} of {moved:.3g}"


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
