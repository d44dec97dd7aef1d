"""A case of the chaos suite, drawn from a seed; pure.

A case is a fault, a place where it strikes, a rank and a moment, and a training program around it.
The same seed always draws the same case, so that any failure can be repeated:
``python tests/chaos/run.py --seed S``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["live", "world"]

TOTAL_STEPS = 5
LAST_FAULTY_STEP = 3  # at least one step follows, whose loss tells

TRAINING = (
    "data",
    "micro-step",
    "forward",
    "loss",
    "backward",
    "gradient norm",
    "evaluation",
    "after step",
)
CELLS = ("computing", "collective", "printing")
EVERYWHERE = (*TRAINING, *CELLS, "model", "eval", "pull")
WITH_TIMEOUT = (*TRAINING, *CELLS, "eval")

LIVE_FAULTS: dict[str, tuple[str, ...]] = {
    "exception": EVERYWHERE,
    "out of memory": EVERYWHERE,
    "interrupt": EVERYWHERE,
    "interrupt at any moment": EVERYWHERE,
    "exception, then interrupt": EVERYWHERE,
    "stuck, interrupted twice": EVERYWHERE,
    "stuck, timed out": WITH_TIMEOUT,
    "engine interrupted": (*EVERYWHERE, "idle"),
    "paused": (*EVERYWHERE, "idle"),
    "worker killed": ("data",),
}
"""Faults that a session survives, and where each can strike."""

WORLD_FAULTS: dict[str, tuple[str, ...]] = {
    "engine killed": (*EVERYWHERE, "idle"),
    "controller killed": ("forward", "computing", "idle"),
    "fork server killed": ("forward", "computing", "idle"),
    "something killed while starting": ("starting", "restarting", "restarting"),
    "interrupt while starting": ("starting", "restarting", "restarting"),
}
"""Faults after which there are fresh engines, and where each can strike."""

EXCEPTIONS = ("ValueError", "RuntimeError", "KeyError", "SystemExit", "OwnBaseError")
HANGS = ("sleep", "loop", "lock", "receive")
PRESSES = ("once", "twice")
FULL = ("too much at once", "more and more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is trained.

    Attributes:
        strategy: how the model is sharded.
        layer: what stands in each block of the model.
        accumulate: micro-steps per step.
        workers: of its DataLoader; None: a data set without one.
        max_grad_norm: None: no clipping.
    """

    strategy: str
    layer: str
    accumulate: int
    workers: int | None
    max_grad_norm: float | None


PROGRAMS = tuple(
    Program(strategy=strategy, layer=layer, accumulate=accumulate, workers=None, max_grad_norm=clip)
    for strategy, layer, accumulate, clip in (
        ("full_shard", "plain", 1, None),
        ("full_shard", "dropout", 2, 0.1),
        ("full_shard", "batchnorm", 1, None),
        ("full_shard", "dropout", 1, None),
        ("shard_grad_op", "plain", 2, None),
        ("shard_grad_op", "batchnorm", 2, 0.1),
        ("shard_grad_op", "dropout", 1, None),
        ("full_shard", "checkpointed", 2, None),
        ("hybrid_shard", "dropout", 2, None),
        ("zero1", "batchnorm", 1, 0.1),
        ("ddp", "plain", 2, None),
    )
)
PROGRAMS_WITH_WORKERS = (
    Program(strategy="full_shard", layer="dropout", accumulate=2, workers=1, max_grad_norm=None),
    Program(
        strategy="shard_grad_op", layer="batchnorm", accumulate=1, workers=2, max_grad_norm=0.1
    ),
)
"""Few, because each is first run without a fault: its losses are what the others must give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault in one program.

    Attributes:
        seed: what it was drawn from.
        fault: a key of ``LIVE_FAULTS`` or ``WORLD_FAULTS``.
        how: which exception, how the rank hangs, or how its memory fills.
        place: where it strikes.
        rank: which rank it strikes; None: all of them.
        step: the training step it strikes in.
        micro_step: the micro-step.
        item: which sample of the data it strikes at, counted on a rank.
        delay: a part of the time in which an interrupt can come.
        program: what is trained.
        ranks: size of the world.
    """

    seed: int
    fault: str
    how: str
    place: str
    rank: int | None
    step: int
    micro_step: int
    item: int
    delay: float
    program: Program
    ranks: int

    @property
    def in_training(self) -> bool:
        """Whether it strikes in a training run."""
        return self.place in TRAINING

    @property
    def may_come_early(self) -> bool:
        """Whether the call can end before the place is reached, by a clock or from outside."""
        by_a_clock = self.fault in ("interrupt at any moment", "stuck, timed out")
        return self.place == "idle" or by_a_clock

    def __str__(self) -> str:
        where = f"{self.place}, rank {'all' if self.rank is None else self.rank}"
        if self.in_training:
            where += f", step {self.step}.{self.micro_step}"
        return f"seed {self.seed}: {self.fault} ({self.how}) in {where}; {self.program}"


def draw(seed: int, kind: Kind, *, ranks: int = 2) -> Case:
    """Return the case of a seed.

    Args:
        seed: any whole number.
        kind: of the fault: ``live`` ones leave the engines as they are.
        ranks: size of the world.
    """
    chance = random.Random(f"{kind} {seed}")
    faults = LIVE_FAULTS if kind == "live" else WORLD_FAULTS
    # by place, so that each is as likely as any other
    fault, place = chance.choice([(f, place) for f, places in faults.items() for place in places])
    if fault == "exception" and chance.random() < 0.1:
        fault, place = "worker killed", "data"
    with_workers = fault == "worker killed" or (place in TRAINING and chance.random() < 0.15)
    program = chance.choice(PROGRAMS_WITH_WORKERS if with_workers else PROGRAMS)
    per_step = 2 * program.accumulate
    rank = chance.randrange(ranks)
    everywhere = fault in ("exception", "out of memory") and chance.random() < 0.1
    return Case(
        seed=seed,
        fault=fault,
        how=_how(fault, place, program, chance),
        place=place,
        rank=None if everywhere else rank,
        step=chance.randint(0, LAST_FAULTY_STEP),
        micro_step=chance.randrange(program.accumulate),
        item=chance.randrange(per_step * (LAST_FAULTY_STEP + 1)),
        delay=chance.random(),
        program=program,
        ranks=ranks,
    )


def _how(fault: str, place: str, program: Program, chance: random.Random) -> str:
    if fault == "interrupt at any moment":
        return chance.choice(PRESSES)
    if fault.startswith("exception"):
        # a worker of a DataLoader hands on what is an Exception, and ends at anything else
        known = EXCEPTIONS[:3] if place == "data" and program.workers else EXCEPTIONS
        return chance.choice(known)
    if fault.startswith("stuck"):
        # in a worker of a DataLoader there is no process group to wait in
        return chance.choice(HANGS[:3] if place == "data" and program.workers else HANGS)
    return chance.choice(FULL) if fault == "out of memory" else ""
