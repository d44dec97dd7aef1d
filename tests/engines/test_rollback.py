"""A step that fails leaves no trace: wherever, on whichever rank, in whatever kind of training.

Each case trains six steps and fails in the fourth, then goes on. Losses, norms, weights, buffers,
optimizer state, random states and the order of the data must be exactly those of a run in which
nothing failed. The reference is such a run, made once for each kind of training; that runs without
a failure are right is what the equality tests show.

By default half of the product is run, so that every kind meets half of the phases and every phase
half of the kinds, on either rank; of the models that ranks hold whole, what can leave a gradient
behind. ``-m nightly`` runs the rest.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fsdp_magic.errors import CellFailedError
from fsdp_magic.notebook.session import Session

STEPS, FAILS_AT = 6, 3

BUILD = """
import random
import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from fsdp_magic.engine import gradients

torch.manual_seed(1)
armed, bad, seen = None, set(), {}

def trip(phase):
    if armed == (phase, rank) and step == FAILS_AT and micro_step == ACCUMULATE - 1:
        raise RuntimeError(f"failed in {phase}")

class Tripping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        trip("backward")
        return gradient

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), NORM, nn.Tanh(), nn.Dropout(DROPOUT))

    def forward(self, x):
        return x + (checkpoint(self.layers, x, use_reentrant=False) if CHECKPOINT
                    else self.layers(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.blocks[0](x)
        trip("forward")
        return self.last(self.blocks[1](Tripping.apply(x))) * self.scale

class Numbered(Dataset):
    inputs = torch.randn(40, 8, dtype=DTYPE)
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        if index in bad:
            raise RuntimeError("failed in data")
        return index, self.inputs[index]

model = Net().to(DTYPE)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
data = DataLoader(Numbered(), batch_size=2, num_workers=2, shuffle=True) if WORKERS else Numbered()

def left():
    engine = __import__("builtins")._fsdp_magic_call.__self__
    states = [s for state in optimizer.state.values() for s in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return {
        "tensors": [t.detach().clone() for t in tensors],
        "training": engine.randomness.state,
        "process": (random.getstate(), torch.get_rng_state(), numpy.random.get_state()),
        "seen": seen,
        "scheduler": scheduler.state_dict(),
        "gradients": [p.grad for p in model.parameters()],
        "position": [(c.place.epoch, c.place.consumed) for c in engine.position._cursors],
    }
"""
CELL = """
ids, x = batch
seen[step, micro_step] = [int(i) for i in ids]
noise = random.random() + numpy.random.random()
with torch.autocast("cpu", dtype=torch.bfloat16, enabled=AUTOCAST):
    out = model(x)
trip("loss")
loss = (out - noise).float().pow(2).mean() if AUTOCAST else (out - noise).pow(2).mean()
"""
PATCHES = {
    "clipping": """
_clip = gradients.clip
def clip(parameters, *rest):
    try:
        trip("clipping")
    except RuntimeError:
        gradients.scale(parameters[:1], torch.tensor(7.0))  # half of its work was done
        raise
    _clip(parameters, *rest)
gradients.clip = clip
""",
    "before the optimizer": """
_measure = gradients.measure
def measure(*args, **kwargs):
    measured = _measure(*args, **kwargs)
    trip("before the optimizer")
    return measured
gradients.measure = measure
""",
}
UNPATCH = """
for name in ("clip", "measure"):
    if f"_{name}" in globals():
        setattr(gradients, name, globals().pop(f"_{name}"))
"""
PHASES = ("data", "forward", "loss", "backward", *PATCHES)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of training."""

    strategy: str = "full_shard"
    dtype: str = "torch.float64"
    autocast: bool = False
    accumulate: int = 1
    checkpoint: bool = False
    workers: bool = False
    norm: str = "nn.LayerNorm(8)"
    dropout: float = 0.0

    def filled(self, code: str) -> str:
        """Return code with this kind's values in it."""
        values = {
            "DTYPE": self.dtype, "AUTOCAST": self.autocast, "ACCUMULATE": self.accumulate,
            "CHECKPOINT": self.checkpoint, "WORKERS": self.workers, "NORM": self.norm,
            "DROPOUT": self.dropout, "FAILS_AT": FAILS_AT,
        }  # fmt: skip
        for name, value in values.items():
            code = code.replace(name, str(value))
        return code


KINDS = {
    "full_shard": Kind(),
    "shard_grad_op": Kind(strategy="shard_grad_op"),
    "zero1": Kind(strategy="zero1"),
    "ddp": Kind(strategy="ddp"),
    "bf16": Kind(dtype="torch.float32", autocast=True),
    "accumulate": Kind(accumulate=4),
    "checkpointing": Kind(checkpoint=True),
    "workers": Kind(workers=True),
    "batch norm": Kind(norm="nn.BatchNorm1d(8)"),
    "dropout": Kind(dropout=0.5),
}
REFERENCES: dict[str, tuple[Any, Any, list[Any]]] = {}


def cases() -> list[Any]:
    marked = []
    for (k, kind), (p, phase), rank in itertools.product(
        enumerate(KINDS), enumerate(PHASES), (0, 1)
    ):
        by_default = (k + p) % 2 == 0 and rank == (k // 2 + p // 2) % 2
        if KINDS[kind].strategy in ("zero1", "ddp"):
            by_default = phase == "backward" and rank == k % 2
        marks = () if by_default else pytest.mark.nightly
        marked.append(pytest.param(kind, phase, rank, marks=marks))
    return marked


def train(session: Session, kind: Kind, steps: int) -> Any:
    return session.train(
        kind.filled(CELL), data="data", steps=steps, accumulate=kind.accumulate,
        micro_batch_size=None if kind.workers else 8 // kind.accumulate // 2, max_grad_norm=0.5,
        scheduler_every="step", show=False,
    )  # fmt: skip


def reference(session: Session, name: str) -> tuple[Any, Any, list[Any]]:
    """Return losses, norms and what is left of a run in which nothing fails."""
    if name not in REFERENCES:
        kind = KINDS[name]
        session.model(kind.filled(BUILD), "model", strategy=kind.strategy, show=False)
        run = train(session, kind, STEPS)
        left = session.pull("left()", rank="all")
        REFERENCES[name] = run.losses, run.grad_norms, left
        session.run("del model, optimizer, scheduler", show=False)
        start_again(session)
    return REFERENCES[name]


def start_again(session: Session) -> None:
    session.run(
        "from fsdp_magic.engine.randomness import TrainingRandomness, seed_all\n"
        "engine = __import__('builtins')._fsdp_magic_call.__self__\n"
        "engine._randomness = TrainingRandomness(engine.world.request.seed, rank)\n"
        "seed_all(engine.world.request.seed)",
        show=False,
    )


def trained_around(session: Session, name: str, phase: str, rank: int, ids: list[int]) -> Any:
    kind = KINDS[name]
    arm = f"bad.update({ids})" if phase == "data" else f"armed = {(phase, rank)!r}"
    built = f"{kind.filled(BUILD)}\n{arm}\n{PATCHES.get(phase, '')}"
    session.model(built, "model", strategy=kind.strategy, show=False)
    try:
        with pytest.raises(CellFailedError, match=f"failed in {phase}") as caught:
            train(session, kind, STEPS)
    finally:
        session.run("bad.clear(); armed = None\n" + UNPATCH, show=False)
    first = caught.value.run
    assert (first.state, first.steps) == ("failed", FAILS_AT)
    assert caught.value.ranks == (rank,)
    assert "Nothing is lost" in str(caught.value)
    second = train(session, kind, STEPS - FAILS_AT)
    left = session.pull("left()", rank="all")
    return first.losses + second.losses, first.grad_norms + second.grad_norms, left


@pytest.mark.parametrize(("name", "phase", "rank"), cases())
def test_a_failed_step_leaves_no_trace(session, name, phase, rank):
    losses, norms, left = reference(session, name)
    ids = [i for (step, _), ids in left[rank]["seen"].items() if step == FAILS_AT for i in ids]
    measured = trained_around(session, name, phase, rank, ids)
    assert measured[:2] == (losses, norms)
    assert_same(measured[2], left)
    assert len({tuple(map(str, seen["seen"].values())) for seen in left}) == 2


def assert_same(ours: Any, theirs: Any, where: str = "rank") -> None:
    """Compare anything exactly."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(theirs):
            assert_same(ours[index], value, f"{where}[{index}]")
    elif hasattr(theirs, "tobytes"):
        assert ours.tobytes() == theirs.tobytes(), where
    else:
        assert ours == theirs, where


def test_votes_from_before_a_failure_do_not_count_after_it(session):
    """A failed cell left one vote of each rank, and the next one begins to count from the first."""
    session.run(
        "import time\nworld = __import__('builtins')._fsdp_magic_call.__self__.world", show=False
    )
    for code in ("1 / 0", "world.vote.take(count=5)\n1 / 0"):
        with pytest.raises(CellFailedError):
            session.run(code, show=False)
    session.run("if rank == 1: time.sleep(0.1)\ntotal = world.vote.take(count=10)[1]", show=False)
    assert session.pull("total", rank="all") == [20, 20]
