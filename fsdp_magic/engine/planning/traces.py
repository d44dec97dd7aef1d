"""TRACER: a request answered: the cell is run and traced in every variant."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_magic.core.planning.requests import TraceReport, TraceRequest, TraceVariant
from fsdp_magic.core.planning.step_trace import (
    Freed,
    OptimizerAllocated,
    OptimizerEvent,
    OptimizerTrace,
    StepTrace,
)
from fsdp_magic.engine.planning.checkpoints import weights_stay_in_files
from fsdp_magic.engine.planning.files_read import FilesRead
from fsdp_magic.engine.planning.no_card import NoCard, cards_are_the_host
from fsdp_magic.engine.planning.program import Described, namespace_of_cell, program_in
from fsdp_magic.engine.planning.tracing import trace_step
from fsdp_magic.engine.planning.weightless import make_fake, weightless


def traced(request: TraceRequest) -> TraceReport:
    """Run and trace a cell."""
    started = time.monotonic()
    files = FilesRead()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with cards_are_the_host(), NoCard():
        with weights_stay_in_files(), weightless(fake):
            namespace = namespace_of_cell(request.code, request.name)
        program = program_in(namespace, sequence_length=request.sequence_length)
        make_fake(program.model, program.optimizers, fake)
        with fake:
            traces = traces_of(program, request.variants, wraps=request.wraps)
    return TraceReport(
        traces=traces,
        seconds=time.monotonic() - started,
        notes=tuple(program.notes),
        files=files.report(),
    )


def traces_of(
    program: Described, variants: Sequence[TraceVariant], *, wraps: Sequence[str]
) -> dict[TraceVariant, StepTrace]:
    """Trace a program in every variant; called within a ``FakeTensorMode``."""
    program.model.train()
    return {
        variant: trace_step(
            program.model, program.forward, wraps=wraps, optimizer=_optimizer(program)
        )
        for variant in variants
    }


def _optimizer(program: Described) -> OptimizerTrace:
    names = [name for name, _ in program.model.named_parameters()]
    state = tuple(OptimizerAllocated(n, p, 8, 0, "optimizer") for n, p in enumerate(names))
    roots = tuple(
        OptimizerAllocated(n, p, 4, 0, "temporary") for n, p in enumerate(names, len(names))
    )
    temporary: tuple[OptimizerEvent, ...] = (*roots, *(Freed(e.id) for e in roots))
    return OptimizerTrace(name="AdamW", first=(*state, *temporary), later=temporary)
