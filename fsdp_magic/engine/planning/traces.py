"""TRACER: a request answered: the cell is run and traced in every variant.

Each variant after the first is traced in a fork of its own, at the same time. What a fork does
not give, for whatever reason, is traced here: so an error is the one that it would be anyway.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.requests import DeviceKind, TraceReport, TraceRequest, TraceVariant
from fsdp_magic.core.planning.step_trace import Allocated, StepTrace
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.planning.checkpoints import weights_stay_in_files
from fsdp_magic.engine.planning.fake_mode import PlanningMode, errors_told_once
from fsdp_magic.engine.planning.files_read import FilesRead
from fsdp_magic.engine.planning.forked import Fork
from fsdp_magic.engine.planning.no_card import NoCard, cards_are_the_host
from fsdp_magic.engine.planning.optimizer_trace import trace_optimizers
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.program import Described, namespace_of_cell, program_in
from fsdp_magic.engine.planning.tracing import BATCH_SIZES, trace_step
from fsdp_magic.engine.planning.weightless import make_fake, weightless

_READS = "where the cell reads a number of a tensor (.item()), it is given 1.0"


def traced(request: TraceRequest) -> TraceReport:
    """Run and trace a cell."""
    started, threads = time.monotonic(), threading.active_count()
    files = FilesRead()
    fake = PlanningMode()
    with (
        errors_told_once(),
        cards_are_the_host(),
        NoCard(),
        weights_stay_in_files(),
        weightless(fake),
    ):
        namespace = namespace_of_cell(request.code, request.name)
    described = program_in(namespace, sequence_length=request.sequence_length)
    make_fake(described.model, described.optimizers, fake)
    traces = traces_of(
        described,
        request.variants,
        fake,
        wraps=request.wraps,
        kind=request.device_kind,
        threads=threads,
    )
    return TraceReport(
        traces=traces,
        seconds=time.monotonic() - started,
        notes=tuple(described.notes),
        files=files.report(),
    )


def traces_of(
    described: Described,
    variants: Sequence[TraceVariant],
    fake: PlanningMode,
    *,
    wraps: Sequence[str],
    kind: DeviceKind,
    threads: int = 1,
) -> dict[TraceVariant, StepTrace]:
    """Trace a program in every variant.

    Args:
        described: the program, of fake tensors.
        variants: what is traced.
        fake: the mode of the tensors.
        wraps: rules whose units are wanted.
        kind: of which kernels.
        threads: that run here and hold no lock; while there are others nothing is forked.
    """
    described.model.train()
    held = {id(p) for optimizer in described.optimizers for p in parameters_of(optimizer)}
    program = Program(
        model=described.model,
        batch_of=described.make_batch,
        loss_of=described.loss_of,
        is_cuda=kind == "cuda",
    )
    names = {id(p): name for name, p in described.model.named_parameters()}
    optimizer = trace_optimizers(described.optimizers, names, is_cuda=program.is_cuda)

    def trace(variant: TraceVariant) -> StepTrace:
        return trace_step(program, variant=variant, wraps=wraps, optimizer=optimizer, trained=held)

    with errors_told_once(), cards_are_the_host(), NoCard() as stand_in, fake:
        can_fork = sys.platform == "linux" and threading.active_count() <= threads
        traces = _each(variants, trace, beside=variants[1:] if can_fork else ())
    if not any(map(_grows, traces.values())):
        raise FsdpError(
            f"what the cell computes takes the same memory for {BATCH_SIZES[0]} samples as for "
            f"{BATCH_SIZES[1]}; let the tensors of example_batch(b) have b samples in dim 0"
        )
    if stand_in.has_given_values:
        described.notes.append(_READS)
    return traces


def _grows(trace: StepTrace) -> bool:
    """Return whether anything of a step grows with its samples."""
    sizes = (event.size for event in trace.micro_step if isinstance(event, Allocated))
    return any(size.per_sample or size.per_pair for size in sizes)


def _each(
    variants: Sequence[TraceVariant],
    trace: Callable[[TraceVariant], StepTrace],
    *,
    beside: Sequence[TraceVariant],
) -> dict[TraceVariant, StepTrace]:
    """Return the trace of each variant; some, of those after the first, are made beside it."""
    with ExitStack() as stack:
        forks = [stack.enter_context(Fork(partial(trace, variant))) for variant in beside]
        traces = {variants[0]: trace(variants[0])}
        for variant, fork in zip(beside, forks, strict=True):
            traces[variant] = _given(fork) or trace(variant)
    return traces | {v: trace(v) for v in variants if v not in traces}


def _given(fork: Fork) -> StepTrace | None:
    """Return what a fork traced; None: nothing, and why is found out without it."""
    try:
        answer = fork.answer()
    except FsdpError:
        return None
    return answer if isinstance(answer, StepTrace) else None
