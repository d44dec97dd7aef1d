"""ENGINE: the numbers of each step of a run, read late.

Reading a step's loss and gradient norm from a GPU in the step would make the host wait for it.
So the numbers of a step are copied to the host together behind its work, and read once the copy
has arrived, a step or two later. All of that is the main thread's: the service thread only sees
lists of numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_magic.core.telemetry import MetricRecord, StepRecords
from fsdp_magic.engine.weights import Weight

_FIRST_NON_FINITE = 10
NO_NUMBER = float("nan")


class Averages:
    """Weighted means by name, kept as what is still to be divided.

    Attributes:
        sums: of weight × value, and of weights, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Weight, Weight]] = {}

    def add(self, values: Mapping[str, Weight], weight: Weight) -> None:
        """Add values that count ``weight`` each; one of weight 0 counts nothing, even NaN."""
        for name, value in values.items():
            total, counted = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + _times(value, weight), counted + weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a finished step left on one rank.

    Attributes:
        loss: this rank's share of the global loss, a 0-dim tensor; None: the cell bound none.
        grad_norm: the global norm, a 0-dim tensor; None: no optimizer stepped.
        metrics: this rank's.
        samples: how many it took.
        tokens: likewise; None where there are none.
    """

    loss: torch.Tensor | None
    grad_norm: torch.Tensor | None
    metrics: Averages
    samples: int
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnTheirWay:
    """Numbers that are being copied from the device, and the event that says they came."""

    host: torch.Tensor
    arrived: Any
    step: int
    names: tuple[str, ...]


class Records:
    """Collects steps.

    Attributes:
        finished: steps so far.
        has_losses: whether the cell ever bound a loss.
        non_finite: indices of the first few steps whose loss was not finite.
    """

    def __init__(self) -> None:
        self._on_their_way: deque[_OnTheirWay] = deque()
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._bound_loss: list[bool] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._metrics: dict[str, list[tuple[int, float, float]]] = {}
        self._knows_tokens = True
        self.finished = 0
        self.has_losses = False
        self.non_finite: list[int] = []

    def add(self, result: StepResult) -> None:
        """Note a finished step; does not wait for the device."""
        self._samples.append(result.samples)
        self._tokens.append(result.tokens or 0)
        self._knows_tokens = self._knows_tokens and result.tokens is not None
        self.has_losses = self.has_losses or result.loss is not None
        names = tuple(result.metrics.sums)
        numbers: list[Any] = [result.loss, result.grad_norm]
        for name in names:
            numbers += result.metrics.sums[name]
        step, self.finished = self.finished, self.finished + 1
        self._bound_loss.append(result.loss is not None)
        if any(isinstance(n, torch.Tensor) and n.device.type == "cuda" for n in numbers):
            self._on_their_way.append(_sent(numbers, step, names))
            self._receive(wait=False)
        else:
            self._receive(wait=True)
            self._take([_number(n) for n in numbers], step, names)

    def complete(self) -> None:
        """Wait for the numbers of every finished step; the run is over."""
        self._receive(wait=True)

    def since(self, first: int) -> StepRecords:
        """Return the steps from an index on whose numbers are known; for any thread."""
        end = len(self._norms)  # appended to last, so every other list is as long
        return StepRecords(
            first=first,
            losses=tuple(self._losses[first:end]),
            grad_norms=tuple(self._norms[first:end]),
            samples=tuple(self._samples[first:end]),
            tokens=tuple(self._tokens[first:end]) if self._knows_tokens else None,
            metrics=tuple(
                MetricRecord(name=name, step=step, total=total, weight=weight)
                for name, entries in list(self._metrics.items())
                for step, total, weight in list(entries)
                if first <= step < end
            ),
        )

    def _receive(self, *, wait: bool) -> None:
        while self._on_their_way:
            oldest = self._on_their_way[0]
            if wait:
                oldest.arrived.synchronize()
            elif not oldest.arrived.query():
                return
            self._on_their_way.popleft()
            self._take(oldest.host.tolist(), oldest.step, oldest.names)

    def _take(self, numbers: list[float], step: int, names: tuple[str, ...]) -> None:
        loss, norm, *sums = numbers
        for place, name in enumerate(names):
            total, weight = sums[2 * place : 2 * place + 2]
            self._metrics.setdefault(name, []).append((step, total, weight))
        if self._bound_loss[step] and not math.isfinite(loss):
            self._note_non_finite(step)
        self._losses.append(loss)
        self._norms.append(norm)

    def _note_non_finite(self, step: int) -> None:
        if len(self.non_finite) < _FIRST_NON_FINITE:
            self.non_finite.append(step)


def _times(value: Weight, weight: Weight) -> Weight:
    if isinstance(weight, torch.Tensor):
        value = torch.as_tensor(value, device=weight.device)
        return torch.where(weight == 0, torch.zeros_like(value), value * weight)
    return value * weight if weight else 0.0


def _number(value: torch.Tensor | float | None) -> float:
    return NO_NUMBER if value is None else float(value)


def _sent(numbers: list[Any], step: int, names: tuple[str, ...]) -> _OnTheirWay:
    """Begin to copy numbers to the host; those that are there already travel along."""
    device = next(n.device for n in numbers if isinstance(n, torch.Tensor) and n.is_cuda)
    together = torch.stack([_on(device, number) for number in numbers])
    host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
    host.copy_(together, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(device))
    return _OnTheirWay(host=host, arrived=arrived, step=step, names=names)


def _on(device: torch.device, number: Any) -> torch.Tensor:
    """Return a number as a 0-dim tensor on a device, without waiting for it."""
    if isinstance(number, torch.Tensor) and number.is_cuda:
        return number.double()
    return torch.full((), _number(number), dtype=torch.float64, device=device)
