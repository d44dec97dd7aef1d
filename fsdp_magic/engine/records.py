"""ENGINE: the numbers of each step of a run, read late.

A step's loss and gradient norm stay tensors on the device until they are reported; reading them
in the step would make the host wait for the device.
"""

from __future__ import annotations

import torch

from fsdp_magic.core.protocol import StepRecords


class Records:
    """Collects steps; written by the main thread, read by the service thread."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._knows_tokens = True
        self._read_losses: list[float] = []
        self._read_norms: list[float] = []
        self.finished = 0

    def add(
        self, *, loss: torch.Tensor, grad_norm: torch.Tensor, samples: int, tokens: int | None
    ) -> None:
        """Note a finished step.

        Args:
            loss: this rank's share of the global loss; a 0-dim tensor.
            grad_norm: the global norm; a 0-dim tensor.
            samples: how many this rank took.
            tokens: likewise; None where there are none.
        """
        self._losses.append(loss)
        self._norms.append(grad_norm)
        self._samples.append(samples)
        self._tokens.append(tokens or 0)
        self._knows_tokens = self._knows_tokens and tokens is not None
        self.finished += 1  # last: the other thread reads no further than this

    def since(self, first: int) -> StepRecords:
        """Return the steps from an index on; called by one thread at a time."""
        self._read()
        end = len(self._read_losses)
        return StepRecords(
            first=first,
            losses=tuple(self._read_losses[first:end]),
            grad_norms=tuple(self._read_norms[first:end]),
            samples=tuple(self._samples[first:end]),
            tokens=tuple(self._tokens[first:end]) if self._knows_tokens else None,
        )

    def _read(self) -> None:
        """Turn the tensors of finished steps into numbers, and let the tensors go."""
        known, finished = len(self._read_losses), self.finished
        if finished == known:
            return
        count = finished - known
        self._read_losses += _numbers(self._losses[:count])
        self._read_norms += _numbers(self._norms[:count])
        del self._losses[:count], self._norms[:count]


def _numbers(tensors: list[torch.Tensor]) -> list[float]:
    """Return 0-dim tensors as numbers, waiting for their device only in this thread."""
    if tensors[0].device.type != "cuda":
        return [float(tensor) for tensor in tensors]
    stacked = torch.stack([tensor.to(torch.float64) for tensor in tensors])
    host = torch.empty(len(tensors), dtype=torch.float64, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    done.synchronize()
    return [float(number) for number in host]
