"""F8: a rank that runs out of memory says so in one line, and its memory is free again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.core.units import MIB
from fsdp_magic.errors import CellFailedError, OutOfMemoryOnRankError
from fsdp_magic.notebook.session import Session

SLACK_BYTES = MIB
"""What may be allocated more than before: a failed cell leaves its compiled code, its text for
tracebacks and words of Python's own; tensors of these tests are 10 MiB and more."""

MODEL = """
import os, torch
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    def forward(self, x, hungry):
        h = self.first(x)
        kept = h.repeat(1, 4000)
        for _ in range(10_000 if hungry else 1):
            kept = torch.tanh(kept)
        return self.last(h) + kept.sum(1, keepdim=True) * 1e-4

class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if rank == 0 and step == bad: torch.ones(400 * 2**17)
        return gradient

class HungryData(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        bytearray(2**40)

model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = [torch.randn(8) for _ in range(256)]
bad = -1
"""
HUNGRY = "outputs = {'y': model(batch, rank == 0 and step == bad)}"
CELL = f"{HUNGRY}\nloss = outputs['y'].square().mean()"


@pytest.fixture(scope="module")
def limited(kept_sessions: list[Any]) -> Iterator[Session]:
    with Session(InitSpec(n=2, memory_limit="256MiB")) as session:
        kept_sessions.append(session)
        yield session


@pytest.fixture
def built(limited: Session) -> Session:
    limited.model(MODEL, show=False)
    return limited


def train(session: Session, cell: str = CELL, *, steps: int = 2, **options: Any) -> list[float]:
    options = {"micro_batch_size": 8, "data": "data", **options}
    return session.train(cell, steps=steps, show=False, **options).losses


def allocated(session: Session) -> list[int]:
    return [status.allocated_bytes for status in session.status(show=False)]


def check_free_again(session: Session, before: list[int]) -> None:
    assert all(now - then < SLACK_BYTES for now, then in zip(allocated(session), before))


def full(session: Session, act: Callable[[], Any]) -> list[str]:
    """Run out of memory, and return the lines that a person reads."""
    before = allocated(session)
    with pytest.raises(OutOfMemoryOnRankError) as caught:
        act()
    check_free_again(session, before)
    return str(caught.value).splitlines()


def test_f8_a_full_rank_is_told_in_one_line_and_training_goes_on_exactly(built: Session) -> None:
    smaller = {"micro_batch_size": 4, "accumulate": 2}
    expected = train(built) + train(built, **smaller)
    built.model(MODEL, show=False)
    losses = train(built)
    built.run("bad = 2", show=False)
    for _ in range(2):  # the second finds all the memory that the first had
        line, released, kept = full(built, lambda: train(built))
        assert line.startswith("rank 0 ran out of memory in the forward of line 13 (kept = torch")
        assert " MiB were asked for, " in line
        assert " of 256 MiB allocated" in line
        assert line.endswith("; try --micro-batch-size 4 --accumulate 2 (the same step)")
        assert released == "rank 1 released, because a peer failed"
        assert kept.startswith("Nothing is lost: the weights are those after step 2")
    built.run("bad = -1", show=False)
    assert losses + train(built, **smaller) == expected


FULL: dict[str, tuple[str, Callable[[Session], Any]]] = {
    "the names of a cell": (
        "rank 0 ran out of memory in the forward of line 2 (x = torch.ones(",
        lambda s: train(
            s,
            "h = model(batch, False); outputs = {'y': h}\n"
            "x = torch.ones(400 * 2**17) if rank == 0 and step == bad else 1\n"
            "loss = h.square().mean()",
        ),
    ),
    "backward": (
        "rank 0 ran out of memory in the backward of line ",
        lambda s: train(s, "loss = Hungry.apply(model(batch, False)).square().mean()"),
    ),
    "a manual step": (
        "rank 0 ran out of memory in the backward of line ",
        lambda s: train(
            s,
            "Hungry.apply(model(batch, False)).square().mean().backward()\n"
            "optimizer.step()\noptimizer.zero_grad()",
            manual=True,
        ),
    ),
    "evaluation": (
        "rank 0 ran out of memory in the forward of line 2 (x = torch.ones(",
        lambda s: s.eval(
            "loss = model(batch, False).square().mean()\n"
            "x = torch.ones(400 * 2**17) if rank == 0 else 1",
            data="data",
            show=False,
        ),
    ),
    "a data set": (
        "ranks 0-1 ran out of memory while data was loaded in line ",
        lambda s: train(s, data="HungryData()"),
    ),
    "a worker": (
        "ranks 0-1 ran out of memory in a DataLoader worker",
        lambda s: train(s, data="torch.utils.data.DataLoader(HungryData(),num_workers=1)"),
    ),
    "a cell": (
        "rank 0 ran out of memory in line 1 (x = torch.ones(400 * 2**17) if rank == 0 else 1): "
        "400 MiB were asked for",
        lambda s: s.run("x = torch.ones(400 * 2**17) if rank == 0 else 1", show=False),
    ),
    "python": (
        "ranks 0-1 ran out of memory in line 1 (x = bytearray(400 * 2**20)): more was asked for",
        lambda s: s.run("x = bytearray(400 * 2**20)", show=False),
    ),
    "sharding": (
        "ranks 0-1 ran out of memory while a model was sharded: 128 MiB were asked for",
        lambda s: s.model(
            "big = torch.nn.Linear(2048, 16384)\nopt = torch.optim.SGD(big.parameters())",
            show=False,
        ),
    ),
    "a pull": (
        "ranks 0-1 ran out of memory",
        lambda s: s.pull("torch.ones(400 * 2**17)"),
    ),
}


@pytest.mark.parametrize("where", FULL)
def test_memory_is_free_again_wherever_it_ran_out(built: Session, where: str) -> None:
    line, act = FULL[where]
    built.run("bad = step_before = 0", show=False)
    assert full(built, lambda: act(built))[0].startswith(line)
    built.run("bad = -1", show=False)
    assert len(train(built, steps=1)) == 1


def test_a_list_that_the_cell_filled_is_named_and_its_memory_comes_back_with_it(
    built: Session,
) -> None:
    before = allocated(built)
    fill = "while True: big.append(torch.ones(20 * 2**17))"
    for act in (
        lambda: built.run(f"big = []\nif rank == 0:\n    {fill}", show=False),
        lambda: train(built, f"if rank == 0:\n    {fill}\nloss = model(batch, False).sum()"),
    ):
        built.run("big = []", show=False)
        with pytest.raises(OutOfMemoryOnRankError) as caught:
            act()
        told = re.search(r"; `big` still holds (\d+) MiB: del big; try ", str(caught.value))
        assert told is not None
        assert 100 < int(told[1]) < 320
        assert "`loss`" not in str(caught.value)
        built.run("del big", show=False)
        check_free_again(built, before)


def test_what_the_person_catches_is_no_failure(built: Session) -> None:
    before = allocated(built)
    code = """
try:
    torch.ones(400 * 2**17)
except RuntimeError:
    caught = True
caught
"""
    assert [output.result for output in built.run(code, show=False)] == ["True", "True"]
    check_free_again(built, before)


def test_a_model_that_one_rank_could_not_shard_is_unbound_on_all(built: Session) -> None:
    built.run("filler = torch.ones(262 * 2**17) if rank == 0 else None", show=False)
    with pytest.raises(OutOfMemoryOnRankError) as caught:
        built.model(
            "big = torch.nn.Linear(1024, 6144)\nopt = torch.optim.SGD(big.parameters())",
            show=False,
        )
    assert caught.value.ranks == (0,)
    outputs = built.run("del filler\n{'big', 'opt'} & set(globals())", show=False)
    assert [output.result for output in outputs] == ["set()"] * 2


def test_what_was_freed_leaves_no_hole(built: Session) -> None:
    """A heap keeps what lies below something that lives; a device gives it out again."""
    code = """
x = torch.ones(20 * 2**17)
del x
large, small = zip(*[(torch.ones(10 * 2**17), torch.ones(2**16)) for _ in range(16)])
del large
len(torch.ones(245 * 2**17)), len(small)  # all that the limit leaves
"""
    outputs = built.run(code, show=False)
    assert [output.result for output in outputs] == ["(32112640, 16)"] * 2


def test_a_rank_that_recovers_when_nothing_is_left_recovers_all_the_same(built: Session) -> None:
    """Groups start threads, and at the limit none can start."""
    fill = """
full = []
if rank == 0:
    try:
        while True: full.append(torch.ones(2**17))
    except RuntimeError:
        pass
raise ValueError("now")
"""
    with pytest.raises(CellFailedError, match="now"):
        built.run(fill, show=False)
    built.run("del full", show=False)
    assert len(train(built, steps=1)) == 1
    assert os.getpid()
