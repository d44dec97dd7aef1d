"""ENGINE: the numbers of each step of a run, read late.

Reading a step's loss and gradient norm from a GPU in the step would make the host wait for it.
So each is copied to the host behind the step's work, and read once the copy has arrived, a step
or two later. All of that is the main thread's: the service thread only sees lists of numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_magic.core.telemetry import StepRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnItsWay:
    """Two numbers that are being copied from the device, and the event that says they came."""

    host: torch.Tensor
    arrived: Any


class Records:
    """Collects steps."""

    def __init__(self) -> None:
        self._on_their_way: deque[_OnItsWay] = deque()
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._knows_tokens = True
        self.finished = 0

    def add(
        self, *, loss: torch.Tensor, grad_norm: torch.Tensor, samples: int, tokens: int | None
    ) -> None:
        """Note a finished step; does not wait for the device.

        Args:
            loss: this rank's share of the global loss; a 0-dim tensor.
            grad_norm: the global norm; a 0-dim tensor.
            samples: how many this rank took.
            tokens: likewise; None where there are none.
        """
        self._samples.append(samples)
        self._tokens.append(tokens or 0)
        self._knows_tokens = self._knows_tokens and tokens is not None
        if loss.device.type == "cuda":
            self._on_their_way.append(_sent(loss, grad_norm))
            self._receive(wait=False)
        else:
            self._take(float(loss), float(grad_norm))
        self.finished += 1

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
        )

    def _receive(self, *, wait: bool) -> None:
        while self._on_their_way:
            oldest = self._on_their_way[0]
            if wait:
                oldest.arrived.synchronize()
            elif not oldest.arrived.query():
                return
            loss, norm = oldest.host.tolist()
            self._on_their_way.popleft()
            self._take(loss, norm)

    def _take(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)


def _sent(loss: torch.Tensor, grad_norm: torch.Tensor) -> _OnItsWay:
    """Begin to copy two 0-dim tensors to the host."""
    pair = torch.stack([loss.to(torch.float64), grad_norm.to(torch.float64)])
    host = torch.empty(2, dtype=torch.float64, pin_memory=True)
    host.copy_(pair, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return _OnItsWay(host=host, arrived=arrived)
