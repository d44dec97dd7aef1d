"""``%fsdp_plan`` without a cell: the session's own training planned, and nothing of it changed."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from fsdp_magic.core.planning.step_trace import Allocated, Size
from fsdp_magic.errors import CellFailedError, UsageError
from fsdp_magic.notebook.session import Session

MODEL = """
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.head = nn.Linear(64, 10)
        self.head.weight = nn.Parameter(torch.zeros(10, 64))
        self.norm = nn.BatchNorm1d(64)
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(self.norm(x))

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [(torch.randn(64), i % 10) for i in range(64)]
"""
CELL = "loss = nn.functional.cross_entropy(model(batch[0]), batch[1])"
STATE = """
import hashlib, random, numpy, threading
def _digest():
    digest = hashlib.sha256()
    local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach()
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    for tensor in tensors:
        digest.update(local(tensor).cpu().numpy().tobytes())
    digest.update(repr((random.getstate(), numpy.random.get_state())).encode())
    modules = [(n, type(m).__name__, sorted(vars(m))) for n, m in model.named_modules()]
    parameters = [(n, type(p).__name__, p.shape) for n, p in model.named_parameters()]
    names = sorted(globals()), torch.get_num_threads()
    digest.update(repr((modules, parameters, names)).encode())
    return digest.hexdigest()
_digest()
"""


def train(session: Session, *, strategy: str = "full_shard", cell: str = CELL) -> list[float]:
    session.model(MODEL, strategy=strategy, show=False)
    return session.train(cell, data="data", steps=2, micro_batch_size=8, show=False).losses


def state_of(session: Session) -> list[str | None]:
    return [output.result for output in session.run(STATE, show=False)]


def children_of_engines(session: Session) -> list[list[int]]:
    engines = (psutil.Process(rank.pid) for rank in session.status())
    return [sorted(child.pid for child in engine.children()) for engine in engines]


@pytest.mark.parametrize(
    "strategy",
    [
        "full_shard",
        *(pytest.param(s, marks=pytest.mark.nightly) for s in ("zero1", "ddp", "shard_grad_op")),
    ],
)
def test_a_plan_leaves_the_session_as_it_was(session: Session, strategy: str) -> None:
    train(session, strategy=strategy)
    before = state_of(session)
    plan = session.plan(strategies=["ddp", "full_shard"], show=False)
    assert state_of(session) == before
    assert plan.device.kind == "cpu"
    assert plan.world_size == 2
    parameters = plan["ddp"].trace.parameters
    assert {name: parameter.shape for name, parameter in parameters.items()} == {
        **{f"blocks.{n}.weight": (64, 64) for n in range(3)},
        **{f"blocks.{n}.bias": (64,) for n in range(3)},
        "head.weight": (10, 64),
        "head.bias": (10,),
        "norm.weight": (64,),
        "norm.bias": (64,),
    }
    events = plan["ddp"].trace.micro_step
    inputs = [e.size for e in events if isinstance(e, Allocated) and e.kind == "input"]
    assert inputs == [Size(0, 64 * 4), Size(0, 8)]
    assert plan.peak_bytes("ddp", 8) > plan.peak_bytes("full_shard", 8) > 0
    after = session.train(CELL, data="data", steps=2, micro_batch_size=8, show=False).losses
    train(session, strategy=strategy)
    straight_on = session.train(CELL, data="data", steps=2, micro_batch_size=8, show=False).losses
    assert after == straight_on


WITHOUT_FORK = """
import fsdp_magic.engine.planning.session as _session_plan
_session_plan.can_fork = lambda engine: {}
"""


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "ddp", "shard_grad_op"])
def test_without_a_fork_all_is_put_back(session: Session, strategy: str) -> None:
    """As on engines with CUDA."""
    train(session, strategy=strategy)
    session.run(WITHOUT_FORK.format(False), show=False)
    try:
        before = state_of(session)
        plan = session.plan(strategies=["ddp", "full_shard"], show=False)
        assert state_of(session) == before
        after = session.train(CELL, data="data", steps=2, micro_batch_size=8, show=False).losses
        session.train(f"{CELL}\nint(loss.sum() > 0)", data="data", steps=1, show=False)
        before = state_of(session)
        with pytest.raises(CellFailedError):
            session.plan(show=False)
        assert state_of(session) == before
    finally:
        session.run(WITHOUT_FORK.format(True), show=False)
    train(session, strategy=strategy)
    forked = session.plan(strategies=["ddp", "full_shard"], show=False)
    assert plan["ddp"].trace == forked["ddp"].trace
    straight_on = session.train(CELL, data="data", steps=2, micro_batch_size=8, show=False).losses
    assert after == straight_on


def test_without_options_the_sessions_own_are_planned(session: Session) -> None:
    session.model(MODEL, strategy="shard_grad_op", wrap="none", show=False)
    session.train(CELL, data="data", steps=1, accumulate=2, show=False)
    plan = session.plan(show=False)
    assert next(iter(plan.strategies)) == "shard_grad_op"
    assert not any("cpu_offload" in name for name in plan.strategies)
    settings = [each.setting for each in plan.strategies.values()]
    assert {(s.wrap, s.accumulate, s.backend) for s in settings} == {("none", 2, "gloo")}
    options = {"gpu_memory": "T4", "world_size": 8, "strategies": ["hybrid_shard"], "seq_len": 9}
    other = session.plan(**options, show=False)
    assert any("--seq-len is for batches that have input_ids" in note for note in other.notes)
    assert (other.device.name, other.device.kind) == ("T4", "cuda")
    assert other["hybrid_shard:4"].setting.backend == "nccl"
    session.model(MODEL, compile=True, show=False)  # nothing is compiled before it runs
    compiled = session.plan(strategies=["ddp"], show=False)
    assert any("planned without --compile" in note for note in compiled.notes)


def test_a_cell_that_fails_without_values_says_where_and_the_session_goes_on(
    session: Session,
) -> None:
    train(session, cell=f"{CELL}\nright = int((model(batch[0]).argmax(-1) == batch[1]).sum())")
    before = state_of(session)
    with pytest.raises(
        CellFailedError, match=r"line 2(.|\n)*so what a tensor holds cannot be read"
    ):
        session.plan(show=False)
    assert state_of(session) == before
    train(session, cell=f"{CELL}\nmetrics = {{'loss': loss.item()}}")
    plan = session.plan(strategies=["ddp"], show=False)
    assert any("is given 1.0" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "cell", "says"),
    [
        ({"data": "data", "manual": True}, "loss = None", "takes whole steps"),
        ({}, "loss = model(torch.ones(4, 64)).sum()", "read no --data"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    session: Session, options: dict[str, object], cell: str, says: str
) -> None:
    with pytest.raises(UsageError, match="none has run"):
        session.plan(show=False)
    session.model(MODEL, show=False)
    session.train(cell, steps=1, show=False, **options)
    with pytest.raises(UsageError, match=says) as caught:
        session.plan(show=False)
    assert len(str(caught.value).splitlines()) == 1


def test_an_interrupted_plan_is_gone_at_once(session: Session) -> None:
    slow = f"import time; time.sleep(30 * (micro_batch_size == 2)); {CELL}"
    train(session, cell=slow)
    before, children = state_of(session), children_of_engines(session)
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        session.plan(show=False)
    assert time.monotonic() - started < 5
    interrupt.join()
    assert state_of(session) == before
    assert children_of_engines(session) == children


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_a_plan_that_dies_costs_the_session_nothing(session: Session, end: str) -> None:
    train(session, cell=f"import os; micro_batch_size != 2 or {end}; {CELL}")
    before = state_of(session)
    with pytest.raises(UsageError, match="ended without an answer"):
        session.plan(show=False)
    assert state_of(session) == before


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        ("fsdp.mean(loss) + fsdp.gather(batch[0]).sum() + fsdp.whole(model.head.bias).sum()", None),
        ("torch.distributed.nn.functional.all_reduce(loss)", "a collective of its own"),
    ],
)
def test_a_plan_waits_for_no_other_rank(session: Session, made: str, refused: str | None) -> None:
    train(session, cell=f"{CELL}\nloss = loss + 0 * ({made})")
    if refused is None:
        assert session.plan(strategies=["ddp"], show=False).max_micro_batch_size["ddp"]
        return
    with pytest.raises(UsageError, match=refused):
        session.plan(strategies=["ddp"], show=False)
