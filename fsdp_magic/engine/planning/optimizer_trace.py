"""ENGINE: what a person's own optimizers take in a step, for parameters of any size.

They are stepped on small stand-ins of their parameters, real ones, of two sizes: what grows with
a parameter is so many bytes an element of it, the rest is fixed. What has only some of its dims,
as the rows and columns of an Adafactor, is told by those. Whose memory something is shows in what
it was computed from. State is made first, as the engine does, and everything is put back.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.step_trace import (
    Freed,
    Kind,
    OptimizerAllocated,
    OptimizerEvent,
    OptimizerTrace,
)
from fsdp_magic.engine import optimizer_state
from fsdp_magic.engine.batches import tensors
from fsdp_magic.engine.planning.optimizer_sizes import Shapes, size_of
from fsdp_magic.engine.planning.tracker import Log, Logged, Taken, Tracker

_SIDES = (3, 5)
"""Length of dim 1 of the stand-ins in the two runs; those that follow are each longer by one."""
_LONGER = 8
"""By how much dim 0 is longer, of the first; that of each further stand-in by one more."""


class _Run(NamedTuple):
    """What stand-ins of one size took.

    Attributes:
        first: in the first step, with the making of state.
        later: in the second.
        shapes: of the stand-in by parameter.
        kept: numbers of what is there after the first step, and after the second.
    """

    first: list[Logged]
    later: list[Logged]
    shapes: dict[str, tuple[int, ...]]
    kept: tuple[set[int], set[int]]


def trace_optimizers(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], *, is_cuda: bool = False
) -> OptimizerTrace:
    """Return what optimizers take in a first step and in later ones.

    Args:
        optimizers: as the person made them; their state is left alone.
        names: of the parameters of the model, by id.
        is_cuda: whether they take the path that is torch's default on CUDA.

    Raises:
        FsdpError: if one cannot be stepped.
    """
    small, large = (_run(optimizers, names, side, is_cuda=is_cuda) for side in _SIDES)
    if [len(small.first), len(small.later)] != [len(large.first), len(large.later)]:
        raise FsdpError(
            f"what {_names_of(optimizers)} allocates depends on the sizes of parameters, which a "
            "plan cannot follow; plan with torch.optim.AdamW in its place"
        )
    whole = {
        names.get(id(p), ""): tuple(p.shape)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return OptimizerTrace(
        name=" and ".join(dict.fromkeys(_described(o, is_cuda=is_cuda) for o in optimizers)),
        first=_events(small.first, large.first, (small, large), whole, large.kept[0]),
        later=_events(small.later, large.later, (small, large), whole, large.kept[1]),
    )


def _run(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], side: int, *, is_cuda: bool
) -> _Run:
    """Step optimizers twice on stand-ins with dims of one length."""
    shapes: dict[str, tuple[int, ...]] = {}
    log = Log(kind="temporary")
    with _disable_current_modes(), torch.enable_grad(), ExitStack() as stack:
        owned: dict[str, list[torch.Tensor]] = {}
        states = [optimizer.state for optimizer in optimizers]
        held = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
        for optimizer in optimizers:
            for name, stand_in in stack.enter_context(_standing_in(optimizer, names, side)):
                shapes[name] = tuple(stand_in.shape)
                owned.setdefault(name, []).append(stand_in)
            stack.enter_context(_as_by_default(optimizer, is_cuda=is_cuda))
        with _OwnedTracker(log, owned) as tracker:
            for optimizer, state, parameters in zip(optimizers, states, held, strict=True):
                _make_alike(optimizer, state, parameters, side)
            first = _step(optimizers, log)
            after_first = tracker.living()
            later = _step(optimizers, log)
            return _Run(first, later, shapes, (after_first, tracker.living()))


def _step(optimizers: Sequence[Optimizer], log: Log) -> list[Logged]:
    for optimizer in optimizers:
        try:
            optimizer_state.make_missing([optimizer])
            optimizer.step()
        except Exception as error:  # of a person's class, whatever it is
            raise FsdpError(
                f"{type(optimizer).__name__} cannot be stepped by itself ({error}), so a plan does "
                "not know its memory; plan with torch.optim.AdamW in its place"
            ) from error
    events = log.events
    log.begin()
    return events


@contextmanager
def _standing_in(
    optimizer: Optimizer, names: Mapping[int, str], side: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Let an optimizer hold small parameters with gradients, and no state, inside."""
    before = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    stand_ins: list[tuple[str, torch.Tensor]] = []
    optimizer.state = defaultdict(dict)
    try:
        number = itertools.count()
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = [_stand_in(p, side, next(number)) for p in parameters]
            named = (names.get(id(p), "") for p in parameters)
            stand_ins += zip(named, group["params"], strict=True)
        yield stand_ins
    finally:
        optimizer.state = state
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def _make_alike(
    optimizer: Optimizer, state: Mapping[Any, Any], held: Sequence[torch.Tensor], side: int
) -> None:
    """Make for stand-ins the state that an optimizer has: some make it when they are made."""
    stand_ins = (p for group in optimizer.param_groups for p in group["params"])
    for parameter, stand_in in zip(held, stand_ins, strict=True):
        for name, value in state.get(parameter, {}).items():
            optimizer.state[stand_in][name] = _small(value, parameter, stand_in, side)


def _small(value: Any, parameter: torch.Tensor, stand_in: torch.Tensor, side: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape:
        return torch.zeros_like(stand_in, dtype=value.dtype, requires_grad=False)
    return torch.ones((side,) * value.ndim, dtype=value.dtype)


def _stand_in(parameter: torch.Tensor, side: int, number: int) -> torch.Tensor:
    others = (side + n for n in range(parameter.ndim - 1))
    shape = (side + _LONGER + number, *others) if parameter.ndim else ()
    small = torch.nn.Parameter(
        torch.ones(shape, dtype=parameter.dtype),
        requires_grad=parameter.requires_grad,
    )
    if small.requires_grad:
        small.grad = torch.ones_like(small)
    return small


@contextmanager
def _as_by_default(optimizer: Optimizer, *, is_cuda: bool) -> Iterator[None]:
    """Let an optimizer take the path that it takes on its device.

    Source: ``_default_to_fused_or_foreach`` in torch/optim/optimizer.py: lists of tensors at once
    on CUDA, one by one on the CPU. ``capturable`` is refused on the CPU and takes nothing more.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        plain = group.get("foreach", False) is None and not group.get("fused")
        if is_cuda and plain and not group.get("differentiable"):
            group["foreach"] = True
        if group.get("capturable"):
            group["capturable"] = False
    try:
        yield
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            for name in ("foreach", "capturable"):
                if name in old:
                    group[name] = old[name]


class _OwnedTracker(Tracker):  # type: ignore[no-untyped-call]
    """Logs as the place of an allocation the parameter that it belongs to.

    Args:
        log: what is written to.
        owned: stand-ins by the name of their parameter.
    """

    def __init__(self, log: Log, owned: Mapping[str, Sequence[torch.Tensor]]) -> None:
        pairs = [(name, tensor) for name, each in owned.items() for tensor in each]
        pairs += [(name, t.grad) for name, t in pairs if t.grad is not None]
        super().__init__(log, [tensor for _, tensor in pairs])
        self._by_shape = {tuple(tensor.shape): name for name, tensor in pairs}
        self._owners = {tensor.untyped_storage()._cdata: name for name, tensor in pairs}
        self._last = ""

    def count(self, operator: str, args: Any, out: Any) -> None:
        """Count what an operator returned: each of a list is its parameter's in that place."""
        lists = next((a for a in args if isinstance(a, (list, tuple)) and a), None)
        if isinstance(out, torch.Tensor):
            self._count_of(self._owner(args) or self._alike(out), out, operator)
            return
        for index, tensor in enumerate(tensors(out)):
            made_from = lists[index] if lists is not None and index < len(lists) else args
            self._count_of(self._owner(made_from) or self._alike(tensor), tensor, operator)

    def _owner(self, value: Any) -> str:
        """Return whose memory something is computed from; nothing, if it is of nobody's."""
        for tensor in tensors(value):
            owner = self._owners.get(tensor.untyped_storage()._cdata)
            if owner is not None:
                self._last = owner
                return owner
        return ""

    def _alike(self, tensor: torch.Tensor) -> str:
        """Return whose shape a tensor has; else whose memory was used last."""
        return self._by_shape.get(tuple(tensor.shape), self._last)

    def _count_of(self, owner: str, tensor: torch.Tensor, operator: str) -> None:
        self.log.place = owner
        self._owners[tensor.untyped_storage()._cdata] = owner
        self.add(tensor, operator)


def _events(
    small: Sequence[Logged],
    large: Sequence[Logged],
    runs: tuple[_Run, _Run],
    whole: Shapes,
    kept: Collection[int],
) -> tuple[OptimizerEvent, ...]:
    """Return the events of a step, with sizes by element.

    Args:
        small: events of the smaller stand-ins.
        large: of the larger ones.
        runs: of both.
        whole: shapes of the parameters.
        kept: numbers of what is there after the step.
    """
    sizes = {e.id: e for e in _taken(small)}
    pairs = {b.id: (sizes[a.id], b) for a, b in zip(_taken(small), _taken(large), strict=True)}
    events: list[OptimizerEvent] = []
    for event in large:
        if isinstance(event, Taken):
            kind: Kind = "optimizer" if event.id in kept else "temporary"
            slope, fixed = size_of(pairs[event.id], [run.shapes for run in runs], whole)
            events.append(OptimizerAllocated(event.id, event.place, slope, fixed, kind))
        elif isinstance(event, Freed):
            events.append(Freed(event.id, carried=event.id not in pairs))
    return tuple(events)


def _taken(events: Sequence[Logged]) -> list[Taken]:
    return [event for event in events if isinstance(event, Taken)]


def _described(optimizer: Optimizer, *, is_cuda: bool) -> str:
    group = optimizer.param_groups[0]
    name = type(optimizer).__name__
    if group.get("fused"):
        return f"{name} (fused)"
    if "foreach" not in group:
        return name
    chosen = group["foreach"]
    return f"{name} ({'foreach' if chosen or (chosen is None and is_cuda) else 'per parameter'})"


def _names_of(optimizers: Sequence[Optimizer]) -> str:
    return " and ".join(dict.fromkeys(type(o).__name__ for o in optimizers))
