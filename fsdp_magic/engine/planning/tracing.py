"""ENGINE: a micro-step of a fake model traced at two batch sizes, as ``core.planning`` wants it.

The first pass runs a small batch, the second a larger one in the same variables: what the first
left is freed in the second, as it is in every later micro-step. If they differ, because a first
forward makes what later ones keep, two more are run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    OptimizerTrace,
    Size,
    StepTrace,
    TracedModule,
    TracedParameter,
)
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import precision
from fsdp_magic.engine.parallel.wrapping import units_of
from fsdp_magic.engine.planning.alignment import aligned, differing, first_difference, linear
from fsdp_magic.engine.planning.passes import Pass, Passes, Program
from fsdp_magic.engine.planning.tracker import Taken
from fsdp_magic.engine.planning.variants import computing_as

BATCH_SIZES = (2, 4)
"""Samples of the two passes. Source: one is special to many operators, which broadcast it."""


def trace_step(
    program: Program,
    *,
    variant: TraceVariant = TraceVariant(),  # noqa: B008
    wraps: Sequence[str] = ("blocks",),
    optimizer: OptimizerTrace,
    trained: Collection[int] | None = None,
) -> StepTrace:
    """Trace a micro-step of a model whose parameters are fake.

    Args:
        program: of fake tensors; this is called within its ``FakeTensorMode``.
        variant: how the model computes.
        wraps: rules whose units are wanted.
        optimizer: what its optimizers take.
        trained: ids of the parameters that an optimizer holds; None: all that require a gradient.

    Raises:
        FsdpError: if passes do not allocate the same in the same order, or a value is asked for.
    """
    model = program.model
    units = units_of(model, wraps[0])
    named = {rule: _named_units(model, rule) for rule in wraps}
    with computing_as(model, variant, units) as spec:
        cast = {n: p for n, p in model.named_parameters() if _is_cast(model, p, spec)}
        heads = {name for cut in named.values() for unit in cut for name in unit}
        small, large, standing = _passes(program, cast, heads)
    sizes = (small.samples, large.samples)
    done = small.operations, large.operations
    return StepTrace(
        parameters=_parameters(model, spec, trained),
        modules=_modules(model),
        micro_step=aligned(small, large),
        optimizer=optimizer,
        units=named,
        precision=variant.precision,
        activation_checkpointing=variant.activation_checkpointing,
        standing=(*_buffers(model), *standing),
        flops=linear(done[0].flops, done[1].flops, sizes),
        moved=linear(done[0].moved, done[1].moved, sizes),
    )


def _passes(
    program: Program, cast: dict[str, nn.Parameter], heads: Collection[str]
) -> tuple[Pass, Pass, tuple[Allocated, ...]]:
    """Return a pass of each batch size that are alike, and what earlier ones left for good."""
    passes = Passes(program, cast, heads=heads)
    before: list[Pass] = []
    with passes.running():
        small, large = (passes.run(size) for size in BATCH_SIZES)
        if first_difference(small, large) is not None:
            before = [small, large]
            small, large = (passes.run(size) for size in BATCH_SIZES)
            parted = first_difference(small, large)
            if parted is not None:
                raise differing(small, large, parted)
        living = passes.tracker.living()
    kept = [
        event
        for run in before
        for event in run.events
        if isinstance(event, Taken) and event.id in living
    ]
    standing = (
        Allocated(-1 - n, Size(float(e.bytes)), "buffer", e.place, e.operator)
        for n, e in enumerate(kept)
    )
    return small, large, tuple(standing)


def _is_cast(model: nn.Module, parameter: nn.Parameter, spec: ModelSpec) -> bool:
    """Return whether a parameter is cast while its unit computes."""
    dtype = precision.compute_dtype(spec)
    if dtype is None or not parameter.is_floating_point() or parameter.dtype == dtype:
        return False
    if parameter.ndim == 0 or parameter.numel() == 0:
        return False
    return parameter not in precision.kept_as_made(model, spec)


def _parameters(
    model: nn.Module, spec: ModelSpec, trained: Collection[int] | None
) -> dict[str, TracedParameter]:
    dtype = precision.compute_dtype(spec)
    as_made = precision.kept_as_made(model, spec)

    def traced(name: str, p: nn.Parameter) -> TracedParameter:
        casts = dtype is not None and p.is_floating_point() and p not in as_made and p.ndim > 0
        return TracedParameter(
            name=name,
            shape=tuple(p.shape),
            element_bytes=p.element_size(),
            compute_bytes=dtype.itemsize if casts and dtype is not None else p.element_size(),
            trained=p.requires_grad and (trained is None or id(p) in trained),
            whole=p.ndim == 0 or p.numel() == 0 or p in as_made,
        )

    return {name: traced(name, p) for name, p in model.named_parameters()}


def _modules(model: nn.Module) -> dict[str, TracedModule]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        name: TracedModule(
            class_name=type(part).__name__,
            parameters=tuple(names[id(p)] for p in part.parameters(recurse=False)),
        )
        for name, part in model.named_modules()
    }


def _named_units(model: nn.Module, rule: str) -> tuple[tuple[str, ...], ...]:
    dotted = {id(part): name for name, part in model.named_modules()}
    return tuple(tuple(dotted[id(m)] for m in unit) for unit in units_of(model, rule))


def _buffers(model: nn.Module) -> list[Allocated]:
    """Return the buffers of a model, each storage once; negative numbers beyond other ones."""
    seen: set[int] = {p.untyped_storage()._cdata for p in model.parameters()}
    buffers: list[Allocated] = []
    for name, buffer in model.named_buffers():
        storage: torch.UntypedStorage = buffer.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            number = -1_000_000 - len(buffers)
            size = Size(float(storage.nbytes()))
            buffers.append(Allocated(number, size, "buffer", name.rpartition(".")[0], "buffer"))
    return buffers
