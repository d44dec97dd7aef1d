"""Training programs on engines beside the same programs as plain loops in one process.

A program is code that builds models, optimizers and data, and a cell. The loop that it must equal
is a function of the test: it gets the names that the code bound, and yields ``(loss, gradient
norm)`` of each step. Everything is float64, with SGD and without clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.session import Session

TOLERANCE = 1e-9
Loop = Callable[[dict[str, Any]], Iterator[tuple[float, float]]]


def norm_of(*parameters: torch.Tensor) -> float:
    """Return the norm of the gradients of parameters."""
    squares = [p.grad.pow(2).sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def in_one_process(
    code: str, loop: Loop, *, models: Sequence[str] = ("model",)
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Build a program here and run its loop: losses, norms, weights before and after."""
    default = torch.get_default_dtype()
    names: dict[str, Any] = {}
    try:
        exec(code, names)
        before = _weights(names, models)
        steps = list(loop(names))
    finally:
        torch.set_default_dtype(default)
    losses, norms = [loss for loss, _ in steps], [norm for _, norm in steps]
    return losses, norms, before, _weights(names, models)


def check_equal(
    session: Session,
    code: str,
    cell: str,
    loop: Loop,
    *,
    strategy: str = "full_shard",
    models: Sequence[str] = ("model",),
    tolerance: float = TOLERANCE,
    norms: bool = True,
    **options: Any,
) -> Run:
    """Run a program on the engines and in one process, and compare everything."""
    losses, grad_norms, before, after = in_one_process(code, loop, models=models)
    session.model(code, strategy=strategy, show=False)
    run = session.train(cell, **{"show": False, "no_shuffle": "data" in options, **options})
    check_losses(run.losses, losses, tolerance=tolerance)
    if norms:
        for step, (ours, theirs) in enumerate(zip(run.grad_norms, grad_norms, strict=True)):
            assert abs(ours - theirs) <= tolerance * theirs, f"norm of step {step}"
    check_weights(session, before, after, models=models, tolerance=tolerance)
    return run


def check_losses(ours: list[float], theirs: list[float], *, tolerance: float = TOLERANCE) -> None:
    """Compare losses, relative to how far they moved."""
    span = max(theirs) - min(theirs)
    assert span > 0
    assert len(ours) == len(theirs)
    for step, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(mine - reference) <= tolerance * span, f"step {step}: {mine} != {reference}"


def check_weights(
    session: Session,
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    *,
    models: Sequence[str] = ("model",),
    tolerance: float = TOLERANCE,
) -> None:
    """Compare weights on the engines with those of one process, relative to how far they moved."""
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    assert moved > 0
    for model in models:
        for name, ours in session.pull(f"dict({model}.named_parameters())").items():
            distance = (ours - after[f"{model}.{name}"]).abs().max().item()
            assert distance <= tolerance * moved, f"{model}.{name} is off by {distance / moved:.3g}"


def _weights(names: dict[str, Any], models: Sequence[str]) -> dict[str, torch.Tensor]:
    return {
        f"{model}.{name}": parameter.detach().clone()
        for model in models
        for name, parameter in eval(model, names).named_parameters()
    }
