"""Strategies compared: each from the same state, and everything as before, however it ended."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from as_before import BUILT, CELL, assert_as_before, note

from fsdp_magic.errors import CellFailedError, UsageError
from fsdp_magic.notebook.session import Session

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "ddp")


def trained(session: Session, cell: str = CELL, strategy: str = "full_shard") -> list[float]:
    """Build and train, note the state on the engines, and return the losses that come next."""
    session.model(BUILT, names=["model", "teacher"], strategy=strategy, show=False)
    options = {"data": "data", "micro_batch_size": 5, "scheduler_every": "step", "show": False}
    session.train(cell, steps=3, **options)
    comes = session.train(cell, steps=6, trial=True, **options).losses
    note(session)
    return comes


def trains_on(session: Session, cell: str = CELL) -> list[float]:
    run = session.train(
        cell, data="data", micro_batch_size=5, scheduler_every="step", steps=6, show=False
    )
    assert run.first_step == 3
    return run.losses


@pytest.mark.parametrize(
    "built",
    [
        each if each == "zero1" else pytest.param(each, marks=pytest.mark.nightly)
        for each in STRATEGIES
    ],
)
def test_every_strategy_gives_the_losses_that_come_next_and_all_is_as_before(
    session, built
) -> None:
    comes = trained(session, strategy=built)
    comparison = session.compare(strategies=STRATEGIES, steps=4, show=False)
    for name in STRATEGIES:
        assert comparison[name].losses == pytest.approx(comes, rel=1e-12), comparison.last_frame[1]
        assert comparison[name].seconds_per_step > 0
        assert comparison[name].samples_per_second > 0
    assert comparison.largest_difference < 1e-12
    assert_as_before(session)
    assert trains_on(session) == comes
    assert session.pull("model.score(torch.ones(2)).item()") == pytest.approx(
        2 * session.pull("model.scale").item()
    )


@pytest.mark.parametrize(
    ("where", "failure"),
    [
        pytest.param(
            "step == 5 and rank == 1", "raise ValueError('here')", marks=pytest.mark.nightly
        ),
        ("step == 4 and rank == 0", "torch.empty(2**50)"),
    ],
)
def test_a_cell_that_fails_leaves_all_as_before(session, where, failure) -> None:
    cell = f"{CELL}\nif {where} and failing:\n    {failure}\n"
    session.run("failing = False", show=False)
    comes = trained(session, cell)
    session.run("failing = True", show=False)
    if "empty" in failure:
        comparison = session.compare(strategies=STRATEGIES[:2], steps=4, show=False)
        for name in STRATEGIES[:2]:
            assert "out of memory" in comparison[name].failure
        assert "out of memory" in comparison.last_frame[1]
    else:
        with pytest.raises(CellFailedError, match="ValueError: here"):
            session.compare(strategies=STRATEGIES, steps=4, show=False)
    assert_as_before(session)
    session.run("failing = False", show=False)
    assert trains_on(session, cell) == comes


BREAKS = {
    "spreading": """
import fsdp_magic.engine.parallel.fsdp as strategy_file
whole = strategy_file.gather_around_calls
def broken(root):
    if rank == 1:
        strategy_file.gather_around_calls = whole
        raise RuntimeError("broken")
    whole(root)
strategy_file.gather_around_calls = broken
""",
    "the optimizer's step": """
whole = optimizer.step
def broken(*args, **kwargs):
    if rank == 1:
        del optimizer.step
        raise RuntimeError("broken")
    whole(*args, **kwargs)
optimizer.step = broken
""",
    "setting aside": """
from fsdp_magic.engine import set_aside
whole = set_aside.ParkedStorages.__init__
def broken(self, tensors):
    if rank == 1:
        set_aside.ParkedStorages.__init__ = whole
        raise RuntimeError("broken")
    whole(self, tensors)
set_aside.ParkedStorages.__init__ = broken
""",
}


@pytest.mark.parametrize(
    "where",
    [
        each if "optimizer" in each else pytest.param(each, marks=pytest.mark.nightly)
        for each in BREAKS
    ],
)
def test_what_breaks_on_one_rank_leaves_all_as_before(session, where) -> None:
    comes = trained(session)
    session.run(BREAKS[where], show=False)
    with pytest.raises(CellFailedError, match="broken"):
        session.compare(strategies=["shard_grad_op"], steps=4, show=False)
    session.run(
        "strategy_file.gather_around_calls = whole"
        if where == "spreading"
        else "vars(optimizer).pop('step', None)"
        if "optimizer" in where
        else "set_aside.ParkedStorages.__init__ = whole",
        show=False,
    )
    assert_as_before(session)
    assert trains_on(session) == comes


@pytest.mark.nightly
def test_an_interrupt_leaves_all_as_before(session) -> None:
    cell = f"{CELL}\nif slow:\n    import time; time.sleep(0.1)\n"
    session.run("slow = False", show=False)
    comes = trained(session, cell)
    session.run("slow = True", show=False)
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.compare(strategies=STRATEGIES, steps=50, show=False)
    timer.join()
    assert_as_before(session)
    session.run("slow = False", show=False)
    assert trains_on(session, cell) == comes


def test_a_comparison_that_nobody_ends_is_ended_by_the_next_cell(session) -> None:
    from fsdp_magic.core.comparison import SetAsideRequest
    from fsdp_magic.notebook.screen import Nowhere

    comes = trained(session)
    session.engines.ask("set_aside", dict.fromkeys(range(2), SetAsideRequest()), screen=Nowhere())
    assert_as_before(session)
    assert trains_on(session) == comes


def test_there_must_be_a_cell_to_compare(session) -> None:
    with pytest.raises(UsageError, match="none has run"):
        session.compare(show=False)


def test_peaks_are_the_same_in_whatever_order_strategies_run(session) -> None:
    session.model(
        """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
left_over = []
""",
        show=False,
    )
    # a first use, as of a library: it takes much for a moment, and leaves something for good
    cell = "if step == 1:\n    left_over.append(torch.ones(6 << 20)); torch.ones(9 << 20)\n"
    cell += "loss = model(torch.ones(1, 512)).pow(2).mean()"
    session.train(cell, steps=1, show=False)
    order = ("ddp", "full_shard+bf16", "full_shard")
    one, other = (
        session.compare(strategies=names, steps=1, show=False) for names in (order, order[::-1])
    )
    for name in order:
        assert max(one[name].peak_bytes) == pytest.approx(max(other[name].peak_bytes), abs=6 << 20)
        assert one[name].idle_bytes[0] > 6 << 22
        assert one[name].fullest.activation_bytes < 6 << 22, "what is left over is no activation"
    assert max(one["full_shard"].peak_bytes) < max(one["ddp"].peak_bytes)


def test_the_peak_is_found_between_the_moments_that_a_step_marks(session) -> None:
    """What a cell holds for a twentieth of a second only, in a step that warms up."""
    build = "import time, torch\nmodel = torch.nn.Linear(2, 2)\n"
    build += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    session.model(build, show=False)
    held = "held = torch.ones(16, 2**20)\n    time.sleep(0.05)\n    del held"
    cell = f"if holding:\n    {held}\nloss = model(torch.ones(2)).sum()"
    peaks = []
    for holding in (False, True):
        session.run(f"holding = {holding}", show=False)
        session.train(cell, steps=1, trial=True, show=False)
        comparison = session.compare(strategies=["ddp"], steps=2, show=False)
        peaks.append(comparison["ddp"].peak_bytes[0])
    assert peaks[1] - peaks[0] > 60 * 2**20


@pytest.mark.nightly
def test_memory_of_what_is_set_aside_is_free(session) -> None:
    session.model(
        """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
        show=False,
    )
    for _ in range(2):
        session.train("loss = model(torch.ones(1, 1024)).pow(2).mean()", steps=2, show=False)
    alone = session.runs[-1].peak_bytes[0]
    comparison = session.compare(strategies=["full_shard"], steps=2, show=False)
    measured = comparison["full_shard"].peak_bytes[0]
    shard = 4 * 1024 * 1024 * 4 / 2
    assert measured < alone + 0.5 * shard  # its parameters alone are one, its state two


@pytest.mark.parametrize("built", ["ddp", "zero1"])
def test_whole_parameters_can_be_set_aside(session, built) -> None:
    session.model(
        "import torch\nmodel = torch.nn.Linear(2048, 1024)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        strategy=built,
        show=False,
    )
    session.train("loss = model(torch.ones(1, 2048)).sum()", steps=1, snapshot_every=1, show=False)
    parked = "all(p.untyped_storage().resizable() for p in model.parameters())"
    assert session.pull(parked, rank="all") == [True, True]
