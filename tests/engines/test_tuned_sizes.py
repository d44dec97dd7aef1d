"""The size that a search finds: it trains, the next does not fit, and no trace is left."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from as_before import assert_as_before, note
from tuned_models import (
    ADAMW,
    CNN,
    CNN_CELL,
    GPT2,
    GPT2_CELL,
    MLP,
    MLP_CELL,
    QUICK,
    QUICK_CELL,
    SGD,
)

from fsdp_magic.core.search import doubling_and_halving
from fsdp_magic.core.specs import InitSpec
from fsdp_magic.core.units import MIB
from fsdp_magic.errors import OutOfMemoryOnRankError
from fsdp_magic.notebook.session import Session
from fsdp_magic.notebook.tuned import Tuned

QUICKS = (QUICK, QUICK_CELL)
MLPS, CNNS, GPT2S = (MLP, MLP_CELL), (CNN, CNN_CELL), (GPT2, GPT2_CELL)
SLACK_BYTES = 4 * MIB
"""A peak on a CPU is what was seen by who looked; what a rank holds grows by a cell's code."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration; ``has_state``: whether the optimizer stepped before the search."""

    of: tuple[str, str]
    n: int = 2
    strategy: str = "full_shard"
    accumulate: int = 1
    optimizer: str = ADAMW
    has_state: bool = True
    margin: float = 0.05
    built: dict[str, Any] = field(default_factory=dict)
    global_batch_size: int | None = None


CASES = {
    "ddp": Case(of=QUICKS, strategy="ddp", has_state=False),
    "zero1": Case(of=QUICKS, strategy="zero1", accumulate=2, margin=0.0),
    "ddp cnn": Case(of=CNNS, strategy="ddp", has_state=False),
    "zero1 mlp": Case(of=MLPS, strategy="zero1", accumulate=3, margin=0.0),
    "sgd mlp": Case(of=MLPS, optimizer=SGD),
    "full_shard mlp": Case(of=MLPS, accumulate=3, has_state=False, margin=0.0),
    "shard_grad_op gpt2": Case(of=GPT2S, strategy="shard_grad_op"),
    "hybrid_shard mlp": Case(
        of=MLPS, n=4, strategy="hybrid_shard", has_state=False, built={"shard_size": 2}
    ),
    "full_shard gpt2": Case(of=GPT2S, n=4, accumulate=3),
    "one rank": Case(of=CNNS, n=1, optimizer=SGD),
    "bf16 gpt2": Case(of=GPT2S, has_state=False, built={"precision": "bf16"}),
    "checkpointing mlp": Case(
        of=MLPS, strategy="shard_grad_op", accumulate=3, built={"activation_checkpointing": True}
    ),
    "global batch": Case(of=MLPS, n=4, strategy="ddp", global_batch_size=192),
    "fp16 mlp": Case(
        of=MLPS, strategy="zero1", optimizer=SGD, margin=0.0, built={"precision": "fp16"}
    ),
}
NIGHTLY = (pytest.mark.nightly, pytest.mark.timeout(600))
BY_DEFAULT = ("ddp", "zero1")
LOW_PRECISION = {"bf16 gpt2": 256 * MIB, "fp16 mlp": 128 * MIB}
"""Their limits."""


def allocated(session: Session) -> list[int]:
    return [each.allocated_bytes for each in session.status(show=False)]


class Searched:
    """A search of a case, with what came before it and what comes next."""

    def __init__(self, session: Session, case: Case) -> None:
        self.session, self.case = session, case
        built, self.cell = case.of
        session.model(
            built + case.optimizer,
            names=["model"],
            strategy=case.strategy,
            show=False,
            **case.built,
        )
        self.options: dict[str, Any] = {"data": "data", "scheduler_every": "step", "show": False}
        self.next = {**self.options, "micro_batch_size": 2, "accumulate": case.accumulate}
        if case.has_state:
            session.train(self.cell, steps=2, **self.next)
        self.comes = session.train(self.cell, steps=3, trial=True, **self.next).losses
        self.batches: dict[str, Any] = {"accumulate": case.accumulate}
        if case.global_batch_size:
            self.batches = {"global_batch_size": case.global_batch_size}
        note(session)

    def tune(self) -> Tuned:
        return self.session.tune(
            self.cell, data="data", margin=self.case.margin, show=False, **self.batches
        )

    def assert_no_trace(self) -> None:
        assert_as_before(self.session)
        assert self.session.train(self.cell, steps=3, **self.next).losses == self.comes


@pytest.mark.parametrize(
    "name",
    [
        n if n in BY_DEFAULT else pytest.param(n, marks=NIGHTLY)
        for n in CASES
        if n not in LOW_PRECISION
    ],
)
def test_the_size_found_trains_the_next_does_not_fit_and_nothing_is_left(limited, name) -> None:
    assert_found(limited(CASES[name].n), name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_so_it_is_in_low_precision(test_run, name) -> None:
    # libraries keep memory for each shape that they compute in it, so engines of its own
    limit = LOW_PRECISION[name]
    with Session(InitSpec(n=2, device="cpu", memory_limit=f"{limit // MIB}MiB")) as session:
        assert_found(session, name, limit=limit)


def assert_found(session: Session, name: str, limit: int = 128 * MIB) -> None:
    case = CASES[name]
    searched = Searched(session, case)
    at_rest = allocated(session)
    tuned = searched.tune()
    print(_row(name, tuned), file=sys.stderr)
    if name in BY_DEFAULT:
        assert all(now - then < 16 * MIB for now, then in zip(allocated(session), at_rest))
    searched.assert_no_trace()
    size, (found,) = tuned.micro_batch_size, tuned.table
    free = (1 - case.margin) * limit
    assert found.ended_by in ("memory", "the global batch")

    steps = 3 if name in BY_DEFAULT else 20
    run = session.train(searched.cell, steps=steps, **searched.options, **searched.batches)
    assert run.micro_batch_size == size
    assert max(run.peak_bytes) <= free + SLACK_BYTES
    if case.global_batch_size:
        larger = next(b for b in range(size + 1, 49) if 48 % b == 0)
        assert tuned.accumulate * size * case.n == case.global_batch_size
    else:
        larger = size + 1
    assert max(p.micro_batch_size for p in tuned.probes) >= larger
    peak = _peak_of(searched, larger)
    assert peak is None or peak > free - SLACK_BYTES, "it was seen not to fit"


LOOKS = """
import threading, time
from fsdp_magic.engine import telemetry

class Looks(threading.Thread):  # at numbers only: no other thread may touch a tensor
    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()
    def run(self):
        while not self.over.wait(0.0005):
            self.peak = max(self.peak, telemetry.memory().allocated_bytes)

looks = Looks()
looks.start()
"""


def _peak_of(searched: Searched, size: int) -> int | None:
    """Return the peak of ordinary steps of a size; None: memory ran out.

    A run looks ten times a second, and its steps here are shorter than that.
    """
    session = searched.session
    session.run(LOOKS, show=False)
    try:
        session.train(
            searched.cell,
            steps=20,
            micro_batch_size=size,
            accumulate=searched.case.accumulate,
            **searched.options,
        )
    except OutOfMemoryOnRankError:
        return None
    finally:
        session.run("looks.over.set(); looks.join()", show=False)
    peaks: list[int] = session.pull("looks.peak", rank="all")
    return max(peaks)


def _row(name: str, tuned: Tuned) -> str:
    (found,) = tuned.table
    size = tuned.micro_batch_size
    return (
        f"TABLE {name}: size {size}, probes {[p.micro_batch_size for p in tuned.probes]}, "
        f"plain bisection {doubling_and_halving(size)}, peak "
        f"{max(found.peak_bytes, default=0) / MIB:.0f} MiB, {tuned.seconds:.1f} s, {found.reason}"
        f" {tuned.notes}"
    )
