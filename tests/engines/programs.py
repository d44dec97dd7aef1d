"""Programs that run alike on the engines and in one process, for tests of what is sharded.

A program is a model, its optimizer, data and a cell. In one process each *rank's* micro-batch is
run by itself, with the names ``rank`` and ``step`` that the cell would find, and losses are
averaged: what ranks do differently, one process does in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from equality import STEPS, Trajectory

from fsdp_magic.notebook.session import Session

MICRO = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    """One training program.

    Attributes:
        built: code that binds ``model``, an optimizer and ``data``, a list of tuples of tensors.
        cell: one micro-step.
        optimizers: the names it binds.
        models: the names of modules whose weights are compared.
        after: code after each step, in one process only (what the engines do by themselves).
    """

    built: str
    cell: str
    optimizers: tuple[str, ...] = ("optimizer",)
    models: tuple[str, ...] = ("model",)


def weights(program: Program) -> str:
    """Return the expression for all weights by dotted name."""
    parts = (f"**{{f'{m}.{{n}}': p for n, p in {m}.named_parameters()}}" for m in program.models)
    return "{" + ", ".join(parts) + "}"


def in_one_process(program: Program, *, ranks: int = 2, accumulate: int = 1) -> Trajectory:
    """Train in this process: every rank's micro-batches one after the other."""
    names: dict[str, Any] = {}
    exec(program.built, names)
    optimizers = [names[name] for name in program.optimizers]
    trajectory = Trajectory(before=_detached(eval(weights(program), names)))
    parts = ranks * accumulate
    for step in range(STEPS):
        total = 0.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(parts):
            first = (step * parts + part) * MICRO
            samples = names["data"][first : first + MICRO]
            batch = tuple(torch.stack(column) for column in zip(*samples, strict=True))
            names |= {"rank": part // accumulate, "micro_step": part % accumulate}
            names |= {"step": step, "batch": batch}
            exec(program.cell, names)
            loss = names["loss"] / parts
            loss.backward()
            total += loss.item()
        gradients = [p.grad for p in eval(weights(program), names).values() if p.grad is not None]
        trajectory.grad_norms.append(torch.sqrt(sum(g.pow(2).sum() for g in gradients)).item())
        for optimizer in optimizers:
            optimizer.step()
        trajectory.losses.append(total)
    trajectory.after = _detached(eval(weights(program), names))
    return trajectory


def on_engines(
    session: Session, program: Program, *, strategy: str = "full_shard", accumulate: int = 1
) -> Trajectory:
    """Train on the engines of a session."""
    session.model(program.built, strategy=strategy, show=False)
    return trained(session, program, accumulate=accumulate)


def trained(session: Session, program: Program, *, accumulate: int = 1) -> Trajectory:
    """Train what is on the engines of a session already."""
    trajectory = Trajectory(before=session.pull(weights(program)))
    run = session.train(
        program.cell,
        data="data",
        steps=STEPS,
        no_shuffle=True,
        micro_batch_size=MICRO,
        accumulate=accumulate,
        show=False,
    )
    trajectory.losses, trajectory.grad_norms = run.losses, run.grad_norms
    trajectory.after = session.pull(weights(program))
    return trajectory


def _detached(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
