"""A model's cell and its training cell traced without weights, as a plan does it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.planning.step_trace import StepTrace
from fsdp_magic.engine.planning.fake_mode import PlanningMode
from fsdp_magic.engine.planning.optimizer_trace import trace_optimizers
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.tracing import trace_step
from fsdp_magic.engine.planning.weightless import make_fake, weightless


def trace_of(
    model: str,
    cell: Callable[[int], str],
    *,
    precision: str = "fp32",
    activation_checkpointing: str = "",
    batch_of: Callable[[int], Any] = int,
) -> StepTrace:
    """Trace cells.

    Args:
        model: the code that binds ``model`` and ``optimizer``.
        cell: returns that which binds ``loss``, for a number of samples.
        precision: what the model computes in.
        activation_checkpointing: what it computes again.
        batch_of: makes what the cell finds as ``batch``.
    """
    name = f"<model of a plan {hash(model)}>"
    # what is a unit is told from the source
    linecache.cache[name] = len(model), None, model.splitlines(keepends=True), name
    names: dict[str, Any] = {}
    fake = PlanningMode()
    with weightless(fake):
        exec(compile(model, name, "exec"), names)
    names["model"].train()
    make_fake(names["model"], [names["optimizer"]], fake)
    with fake:

        def batch_for(samples: int) -> tuple[int, Any]:
            return samples, batch_of(samples)

        def loss_of(batch: tuple[int, Any]) -> Any:
            samples, names["batch"] = batch
            exec(cell(samples), names)
            loss, names["loss"] = names["loss"], names["loss"].detach()
            return loss

        parameters = {id(p): n for n, p in names["model"].named_parameters()}
        return trace_step(
            Program(model=names["model"], batch_of=batch_for, loss_of=loss_of),
            variant=TraceVariant(precision, activation_checkpointing),
            optimizer=trace_optimizers([names["optimizer"]], parameters),
        )
