"""F24 to F26: one rank's room decides for all, state to come is counted, nothing is left."""

from __future__ import annotations

from typing import Any

import pytest
from as_before import assert_as_before, note
from tuned_models import ADAMW, QUICK, QUICK_CELL

from fsdp_magic.core.search import Predicted
from fsdp_magic.core.units import MIB
from fsdp_magic.errors import CellFailedError, OutOfMemoryOnRankError
from fsdp_magic.notebook import session_tuning
from fsdp_magic.notebook.session import Session
from fsdp_magic.notebook.tuned import Tuned

OPTIONS = {"data": "data", "scheduler_every": "step", "show": False}
SMALL = {**OPTIONS, "micro_batch_size": 2}
SLACK_BYTES = 2 * MIB
"""What a rank may hold more: code of a cell that ran, and what libraries keep of a first use."""
HEIGHT_BYTES = 4 * MIB
"""Of a height of a short step, what a probe on a busy machine may not have seen."""


@pytest.fixture
def built(limited: Any) -> Session:
    """Two ranks of 128 MiB with a model that has trained, so that libraries hold what they keep."""
    session: Session = limited(2)
    session.model(QUICK + ADAMW, names=["model"], show=False)
    session.train(QUICK_CELL, steps=2, **SMALL)
    return session


def sizes(tuned: Tuned) -> list[int]:
    return [probe.micro_batch_size for probe in tuned.probes]


def allocated(session: Session) -> list[int]:
    return [each.allocated_bytes for each in session.status(show=False)]


def test_f24_the_rank_with_least_room_decides_for_all(built: Session) -> None:
    whole = built.tune(max=30, show=False).micro_batch_size
    built.run("hog = torch.ones(12 * 2**20) if rank == 1 else None", show=False)
    comes = built.train(QUICK_CELL, steps=2, trial=True, **SMALL).losses
    note(built)
    tuned = built.tune(show=False)
    assert_as_before(built)
    (found,) = tuned.table
    assert found.ended_by == "memory"
    assert "rank 1" in found.reason
    assert tuned.micro_batch_size < 0.75 * whole
    assert found.peak_bytes[1] - found.peak_bytes[0] > 30 * MIB
    assert built.train(QUICK_CELL, steps=2, **SMALL).losses == comes
    # it trains: what a probe did not see of a height is what the margin is for
    run = built.train(QUICK_CELL, steps=3, **OPTIONS)
    assert (run.steps, run.micro_batch_size) == (3, tuned.micro_batch_size)
    known = f"%fsdp_tune found that {tuned.micro_batch_size} fits"
    with pytest.raises(OutOfMemoryOnRankError, match=f"{known}: --micro-batch-size"):
        built.train(QUICK_CELL, steps=1, **{**OPTIONS, "micro_batch_size": 2 * whole})
    built.run("more = torch.ones(20 * 2**20) if rank == 1 else None", show=False)
    with pytest.raises(OutOfMemoryOnRankError, match=f"{known}; more is held on the devices now"):
        built.train(QUICK_CELL, steps=1, **OPTIONS)


STATEFUL = (
    QUICK
    + """
more = nn.Linear(1024, 4096)  # 16 MiB of it, in a whole copy; its state is twice that
model.more = more
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
)
STATEFUL_CELL = f"{QUICK_CELL} + 1e-3 * model.more(torch.ones(1024)).square().mean()"


def test_f25_state_that_is_still_to_come_is_counted_and_gone_again(limited) -> None:
    session = limited(2)
    session.model(STATEFUL, names=["model"], strategy="ddp", show=False)
    cell = STATEFUL_CELL.replace("model.more(", "more(")
    comes = session.train(cell, data="data", micro_batch_size=2, steps=2, trial=True, show=False)
    note(session)
    tuned = session.tune(cell, data="data", show=False)
    assert_as_before(session)
    assert session.pull("len(optimizer.state)") == 0
    run = session.train(cell, data="data", micro_batch_size=2, steps=2, show=False)
    assert run.losses == comes.losses
    run = session.train(cell, data="data", steps=4, show=False)
    assert run.micro_batch_size == tuned.micro_batch_size
    assert max(run.peak_bytes) < 0.95 * 128 * MIB + HEIGHT_BYTES
    assert session.pull("len(optimizer.state)") > 0


SHARE = """
import psutil, types
asked_of_the_system = psutil.virtual_memory
psutil.virtual_memory = lambda: types.SimpleNamespace(available=2 * 96 * 2**20, total=2**33)
"""


def test_f26_without_a_limit_a_rank_is_refused_more_than_its_share(session: Session) -> None:
    session.model(QUICK + ADAMW, names=["model"], show=False)
    greedy = f"if len(batch) > 6: torch.ones(200 * 2**18)\n{QUICK_CELL}"
    session.train(greedy, steps=1, **SMALL)
    note(session)
    session.run(SHARE, show=False)
    try:
        tuned = session.tune(margin=0.0, show=False)
    finally:
        session.run("psutil.virtual_memory = asked_of_the_system", show=False)
    assert (tuned.micro_batch_size, tuned.table[0].ended_by) == (6, "memory")
    assert "runs out of memory on ranks 0-1" in tuned.table[0].reason
    assert_as_before(session)
    assert session.run("len(torch.ones(200 * 2**18))", show=False)[0].result == "52428800"


# ---------------------------------------------------------------- wherever it runs out

HOG = "[torch.ones(2**20) for _ in range(200)]"
FULL = {
    "forward": f"if len(batch) > 9 and {{who}}: {HOG}\n{QUICK_CELL}",
    "backward": f"""
class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if micro_batch_size > 9 and {{who}}: {HOG}
        return gradient
loss = Hungry.apply(model(batch)).square().mean()
""",
    "the optimizer's step": f"hungry.now = len(batch) > 9 and {{who}}\n{QUICK_CELL}",
    "the data": QUICK_CELL,
}
HUNGRY = f"""
import types
hungry = types.SimpleNamespace(now=False, of_data=False)
class Hungry(torch.optim.AdamW):
    def step(self, closure=None):
        if hungry.now: {HOG}
        return super().step(closure)
optimizer = Hungry(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
def collate(rows):
    if len(rows) > 9 and hungry.of_data: {HOG}
    return torch.stack(rows)
"""


@pytest.mark.parametrize(
    ("where", "who"),
    [
        ("forward", "rank == 1"),
        ("backward", "rank == 0"),
        ("the optimizer's step", "rank == 1"),
        ("the data", "True"),
        *(
            pytest.param(where, who, marks=pytest.mark.nightly)
            for where in ("forward", "backward", "the optimizer's step")
            for who in ("True",)
        ),
    ],
)
def test_memory_is_free_again_wherever_a_size_runs_out(built: Session, where, who) -> None:
    cell = FULL[where].replace("{who}", who)
    built.model(QUICK + HUNGRY, names=["model"], show=False)
    options = {"collate": "collate"} if where == "the data" else {}
    built.train(cell, steps=2, **SMALL, **options)
    comes = built.train(cell, steps=3, trial=True, **SMALL, **options).losses
    if where == "the data":
        built.run("hungry.of_data = True", show=False)
    note(built)
    at_rest = allocated(built)
    tuned = built.tune(show=False)
    assert all(now - then < SLACK_BYTES for now, then in zip(allocated(built), at_rest))
    refused = [probe for probe in tuned.probes if not probe.fits]
    assert tuned.micro_batch_size == 9
    assert min(probe.micro_batch_size for probe in refused) == 10
    ranks = "" if who == "True" else f" {who[-1]}"  # of all ranks some are let go first
    assert all(p.why.startswith(f"runs out of memory on rank{ranks}") for p in refused)
    assert_as_before(built)
    assert built.train(cell, steps=3, **SMALL, **options).losses == comes


def test_gradients_of_the_person_come_back_where_nothing_is_left(built: Session) -> None:
    """They are put back while the frames of the size that ran out may still hold all there is."""
    built.run(
        "big = torch.ones(2 * 2**20, requires_grad=True)\n"
        "del scheduler\noptimizer = torch.optim.SGD([*model.parameters(), big], lr=0.1)\n"
        "big.grad = torch.full_like(big, 3.0)\nkept = []",
        show=False,
    )
    note(built)
    cell = f"""
kept = []
if len(batch) > 3:
    for _ in range(200): kept.append(torch.ones(2**18))
{QUICK_CELL} + 1e-6 * big.sum()
"""
    tuned = built.tune(cell, data="data", show=False, max=6)
    assert tuned.micro_batch_size == 3
    assert_as_before(built)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("off", [0.5, pytest.param(2.0, marks=pytest.mark.nightly)])
def test_a_wrong_plan_ends_at_the_same_size(built: Session, monkeypatch, off: float) -> None:
    right = built.tune(show=False)
    assert len(right.probes) <= 3
    beside = session_tuning._beside

    def wrong(held: int, peak_bytes: Any) -> Predicted:
        predicted = beside(held, peak_bytes)
        return lambda size: off * predicted(size)

    monkeypatch.setattr(session_tuning, "_beside", wrong)
    tuned = built.tune(show=False)
    assert tuned.micro_batch_size == right.micro_batch_size
    assert sizes(tuned)[0] != sizes(right)[0]
    assert len(tuned.probes) <= 6


def test_without_a_plan_it_ends_at_the_same_size(built: Session) -> None:
    right = built.tune(show=False)
    manual = f"{QUICK_CELL}\nloss.backward()\noptimizer.step()\noptimizer.zero_grad()"
    tuned = built.tune(manual, data="data", manual=True, show=False)
    assert abs(tuned.micro_batch_size - right.micro_batch_size) <= 1
    assert len(tuned.probes) <= 5
    assert tuned.planned == []


def test_where_nothing_fits_that_is_the_error_and_no_trace_is_left(built: Session) -> None:
    cell = f"{HOG}\n{QUICK_CELL}"
    note(built)
    with pytest.raises(OutOfMemoryOnRankError, match="ran out of memory in the forward"):
        built.tune(cell, data="data", show=False)
    with pytest.raises(CellFailedError, match="not even a micro-batch of 2 fits"):
        built.tune(QUICK_CELL, data="data", margin=0.99, show=False)
    frame = built._history.last_frame
    assert frame is not None
    assert "a micro-batch of 1 is left out: it raised ValueError: Expected more" in frame[1]
    assert_as_before(built)


@pytest.mark.nightly
def test_memory_at_rest_does_not_grow_from_search_to_search(built: Session) -> None:
    built.tune(show=False)
    at_rest = allocated(built)
    for _ in range(4):
        built.tune(show=False)
    assert all(now - then < SLACK_BYTES for now, then in zip(allocated(built), at_rest))
