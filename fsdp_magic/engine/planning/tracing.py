"""ENGINE: a micro-step of a fake model traced at two batch sizes, as ``core.planning`` wants it.

The first pass runs a small batch, the second a larger one in the same variables: what the first
left is freed in the second, as it is in every later micro-step. Both allocate the same in the
same order, so each allocation is a polynomial in the batch size: constant if no dim of its shape
changed, linear if one did, quadratic if two did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Event,
    Freed,
    OptimizerTrace,
    Size,
    StepTrace,
    TracedModule,
    TracedParameter,
)
from fsdp_magic.engine.parallel.wrapping import units_of
from fsdp_magic.engine.planning.tracker import Log, Logged, Taken, Tracker

BATCH_SIZES = (2, 4)
"""Samples of the two passes. Source: one is special to many operators, which broadcast it."""


def trace_step(
    model: nn.Module,
    forward: Callable[[int], torch.Tensor],
    *,
    wraps: Sequence[str] = ("blocks",),
    optimizer: OptimizerTrace,
) -> StepTrace:
    """Trace a micro-step of a model whose parameters are fake.

    Args:
        model: of fake tensors; called within a ``FakeTensorMode``.
        forward: runs the cell for a number of samples, and returns its loss.
        wraps: rules whose units are wanted.
        optimizer: what its optimizers take.

    Raises:
        FsdpError: if the two passes do not allocate the same in the same order.
    """
    small, large = _passes(model, forward)
    names = {id(p): n for n, p in model.named_parameters()}
    modules = {
        name: TracedModule(
            class_name=type(part).__name__,
            parameters=tuple(names[id(p)] for p in part.parameters(recurse=False)),
        )
        for name, part in model.named_modules()
    }
    dotted = {id(part): name for name, part in model.named_modules()}
    return StepTrace(
        parameters={n: _parameter(n, p) for n, p in model.named_parameters()},
        modules=modules,
        micro_step=_aligned(small, large),
        optimizer=optimizer,
        units={
            rule: tuple(tuple(dotted[id(m)] for m in unit) for unit in units_of(model, rule))
            for rule in wraps
        },
    )


def _parameter(name: str, p: nn.Parameter) -> TracedParameter:
    size = p.element_size()
    return TracedParameter(
        name=name,
        shape=tuple(p.shape),
        element_bytes=size,
        compute_bytes=size,
        trained=p.requires_grad,
        whole=p.ndim == 0,
    )


def _passes(
    model: nn.Module, forward: Callable[[int], torch.Tensor]
) -> tuple[list[Logged], list[Logged]]:
    """Return the logs of a pass at each batch size."""
    log = Log()
    logs = []
    with Tracker(log, [*model.parameters(), *model.buffers()]), _marks(model, log):
        for size in BATCH_SIZES:
            log.events = []
            log.place, log.kind = "", "activation"
            loss = forward(size)
            log.mark("backward")
            log.place, log.kind = "", "temporary"
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            log.mark("micro_step_end")
            logs.append(log.events)
        log.events = []
    return logs[0], logs[1]


@contextmanager
def _marks(model: nn.Module, log: Log) -> Iterator[None]:
    """Log inside where forwards begin and end, and where gradients arrive."""
    names = {id(part): name for name, part in model.named_modules()}
    parameters = {id(p): name for name, p in model.named_parameters()}
    stack: list[str] = []

    def before(part: nn.Module, _: Any) -> None:
        stack.append(names[id(part)])
        log.place = stack[-1]
        log.mark("forward" if log.kind == "activation" else "recompute", stack[-1])

    def after(_part: nn.Module, _: Any, output: Any) -> None:
        name = stack.pop()
        log.place = stack[-1] if stack else ""
        log.mark("forward_end" if log.kind == "activation" else "recompute_end", name)
        if log.kind != "activation":
            return
        for leaf in tree_leaves(dict(output) if hasattr(output, "to_tuple") else output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: arrives(name))  # type: ignore[no-untyped-call]

    def arrives(name: str) -> None:
        log.place = name
        log.mark("module_backward", name)

    def complete(parameter: nn.Parameter) -> None:
        log.mark("gradient", parameters[id(parameter)])
        parameter.grad = None

    with contextlib.ExitStack() as hooks:
        for part in model.modules():
            hooks.callback(part.register_forward_pre_hook(before).remove)
            hooks.callback(part.register_forward_hook(after).remove)
        for p in model.parameters():
            if p.requires_grad:
                handle = p.register_post_accumulate_grad_hook(complete)  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
        yield


def _aligned(small: list[Logged], large: list[Logged]) -> tuple[Event, ...]:
    """Return the second pass, its sizes as polynomials.

    Raises:
        FsdpError: if the passes differ in more than sizes.
    """
    taken_small = [e for e in small if isinstance(e, Taken)]
    taken_large = [e for e in large if isinstance(e, Taken)]
    same = len(taken_small) == len(taken_large) and all(
        a.operator == b.operator and a.place == b.place
        for a, b in zip(taken_small, taken_large, strict=True)
    )
    if not same:
        raise FsdpError("the two passes differ")
    number = {e.id: n for n, e in enumerate(taken_large)}
    carried = {e.id: n for n, e in enumerate(taken_small)}
    events: list[Event] = []
    sizes = iter(zip(taken_small, taken_large, strict=True))
    for event in large:
        if isinstance(event, Taken):
            events.append(
                Allocated(
                    number[event.id], _size(*next(sizes)), event.kind, event.place, event.operator
                )
            )
        elif not isinstance(event, Freed):
            events.append(event)
        elif event.id in number:
            events.append(Freed(number[event.id]))
        elif event.id in carried:
            events.append(Freed(carried[event.id], carried=True))
    return tuple(events)


def _size(small: Taken, large: Taken) -> Size:
    """Return the polynomial that two sizes are on."""
    first, second = BATCH_SIZES
    if small.bytes == large.bytes:
        return Size(float(large.bytes))
    changed = sum(a != b for a, b in zip(small.shape, large.shape, strict=False))
    if changed >= 2:
        pair = (large.bytes - small.bytes) / (second**2 - first**2)
        return Size(small.bytes - pair * first**2, 0.0, pair)
    slope = (large.bytes - small.bytes) / (second - first)
    return Size(small.bytes - slope * first, slope)
