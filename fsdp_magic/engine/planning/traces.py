"""TRACER: a request answered: the cell is run and traced in every variant.

Each variant after the first is traced in a fork of its own, at the same time. What a fork does
not give, for whatever reason, is traced here: so an error is the one that it would be anyway.
A variant that cannot be traced costs the others nothing, unless none can.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.requests import DeviceKind, TraceReport, TraceRequest, TraceVariant
from fsdp_magic.core.planning.step_trace import Allocated, StepTrace
from fsdp_magic.engine import cells
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
_OF_LIBRARIES = (nn.LSTM, nn.GRU, nn.RNN)
"""Modules that oneDNN and cuDNN compute whole, in memory that no operator of torch shows.

Source: ``mkldnn_rnn_layer`` and ``_cudnn_rnn`` in aten/src/ATen/native/native_functions.yaml."""


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
    traces, untraced = traces_of(
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
        untraced=untraced,
    )


def traces_of(
    described: Described,
    variants: Sequence[TraceVariant],
    fake: PlanningMode,
    *,
    wraps: Sequence[str],
    kind: DeviceKind,
    threads: int = 1,
) -> tuple[dict[TraceVariant, StepTrace], dict[TraceVariant, str]]:
    """Trace a program in every variant.

    Args:
        described: the program, of fake tensors.
        variants: what is traced.
        fake: the mode of the tensors.
        wraps: rules whose units are wanted.
        kind: of which kernels.
        threads: that run here and hold no lock; while there are others nothing is forked.

    Returns:
        The traces, and why a variant has none.

    Raises:
        Exception: of the first variant, if none can be traced.
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
        tries = _each(
            variants, trace, model=described.model, beside=variants[1:] if can_fork else ()
        )
    traces, untraced = tries.traces, tries.untraced
    if not any(map(_grows, traces.values())):
        raise FsdpError(
            f"what the cell computes takes the same memory for {BATCH_SIZES[0]} samples as for "
            f"{BATCH_SIZES[1]}; let the tensors of example_batch(b) have b samples in dim 0"
        )
    if stand_in.has_given_values:
        described.notes.append(_READS)
    described.notes.extend(_about_libraries(described.model))
    return traces, untraced


def _grows(trace: StepTrace) -> bool:
    """Return whether anything of a step grows with its samples."""
    sizes = (event.size for event in trace.micro_step if isinstance(event, Allocated))
    return any(size.per_sample or size.per_pair for size in sizes)


def _about_libraries(model: nn.Module) -> list[str]:
    """Return that libraries take memory of their own for some modules, which torch never sees."""
    kinds = (kind for kind in _OF_LIBRARIES if any(isinstance(m, kind) for m in model.modules()))
    return [
        f"memory of nn.{kind.__name__}'s libraries (what oneDNN works in, what cuDNN reserves) is "
        "not in the plan; leave room for it"
        for kind in kinds
    ]


class _Tries:
    """Traces that were tried.

    Args:
        trace: makes one.

    Attributes:
        traces: by variant.
        untraced: why a variant has none.
    """

    def __init__(self, trace: Callable[[TraceVariant], StepTrace]) -> None:
        self._trace = trace
        self._first_error: Exception | None = None
        self.traces: dict[TraceVariant, StepTrace] = {}
        self.untraced: dict[TraceVariant, str] = {}

    def add(self, variant: TraceVariant, model: nn.Module) -> None:
        """Trace a variant."""
        try:
            self.traces[variant] = self._trace(variant)
        except Exception as error:  # of the person's model, whatever it is
            self._first_error = self._first_error or error
            self.untraced[variant] = _line_of(error)
            model.zero_grad()  # what a backward that failed has left

    def settle(self) -> _Tries:
        """Return this.

        Raises:
            Exception: the first one, if nothing could be traced.
        """
        if self._first_error is not None and not self.traces:
            raise self._first_error
        self._first_error = None
        return self


def _line_of(error: Exception) -> str:
    """Return an error in a line."""
    failure = cells.describe(error)
    message = next(iter(failure.message.strip().splitlines()), "")
    if failure.kind == "usage":
        return message
    return f"{failure.exception_type}: {message}".removesuffix(": ")


def _each(
    variants: Sequence[TraceVariant],
    trace: Callable[[TraceVariant], StepTrace],
    *,
    model: nn.Module,
    beside: Sequence[TraceVariant],
) -> _Tries:
    """Trace each variant; some, of those after the first, beside it."""
    tries = _Tries(trace)
    with ExitStack() as stack:
        forks = [stack.enter_context(Fork(partial(trace, variant))) for variant in beside]
        tries.add(variants[0], model)
        given = {
            variant: found
            for variant, fork in zip(beside, forks, strict=True)
            if (found := _given(fork)) is not None
        }
    for variant in variants[1:]:
        if variant in given:
            tries.traces[variant] = given[variant]
        else:
            tries.add(variant, model)
    return tries.settle()


def _given(fork: Fork) -> StepTrace | None:
    """Return what a fork traced; None: nothing, and why is found out without it."""
    try:
        answer = fork.answer()
    except FsdpError:
        return None
    return answer if isinstance(answer, StepTrace) else None
