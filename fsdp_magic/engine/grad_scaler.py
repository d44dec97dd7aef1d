"""ENGINE: fp16 loss scaling: small gradients survive backward, too large ones skip their step.

fp16 knows no number below 6e-8, so the loss is multiplied by a scale before backward and the
gradient divided by it once it is reduced. If the gradient is not finite then, no optimizer steps,
and the scale halves; after 2,000 good steps it doubles. The rules and the scale are those of
``torch.amp.GradScaler``, one for all models of a session, which goes on from run to run. It
judges the norm of the whole gradient, which is the same on every rank, so all skip the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from fsdp_magic.core.telemetry import SkippedSteps
from fsdp_magic.engine import gradients
from fsdp_magic.engine.parallel.sharded_model import ShardedModel


class Scaling(Protocol):
    """How a run scales its loss."""

    @property
    def skipped(self) -> SkippedSteps | None:
        """What the run has skipped; None: nothing. For any thread."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as backward takes it."""

    def unscale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide the gradient, which is reduced by now, by the scale."""

    def skips(self, norm: torch.Tensor) -> bool:
        """Return whether the optimizers must not step with a gradient of that norm."""

    def update(self, norm: torch.Tensor) -> None:
        """Choose the scale of the next step; the step is agreed on."""


class NoScaling:
    """Of fp32 and bf16, whose smallest numbers are small enough."""

    skipped: SkippedSteps | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return loss

    def unscale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do nothing."""

    def skips(self, norm: torch.Tensor) -> bool:  # noqa: ARG002
        """Let every step be."""
        return False

    def update(self, norm: torch.Tensor) -> None:
        """Do nothing."""


class Fp16Scaling:
    """Of fp16.

    Args:
        scaler: the session's.
        device: where the gradient's norm is.

    Attributes:
        skipped: what the run has skipped; None: nothing.
    """

    def __init__(self, scaler: GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        self._one = torch.ones((), device=device)
        # never stepped: through it the scaler is shown the norm in place of every gradient
        self._shown = SGD([torch.zeros((), device=device)], lr=0.0)
        self.skipped: SkippedSteps | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide the gradient by the scale, as the scaler does, but for shards too."""
        inverse = self._scaler.scale(self._one).double().reciprocal().float()
        gradients.scale(parameters, inverse)

    def skips(self, norm: torch.Tensor) -> bool:
        """Return whether the gradient is not finite; waits for the device."""
        return not bool(torch.isfinite(norm.float()))

    def update(self, norm: torch.Tensor) -> None:
        """Choose the scale of the next step."""
        (shown,) = self._shown.param_groups[0]["params"]
        shown.grad = norm.detach().to(shown, copy=True)
        self._scaler.unscale_(self._shown)
        self._scaler.update()
        if self.skips(norm):
            before = 0 if self.skipped is None else self.skipped.count
            self.skipped = SkippedSteps(count=before + 1, scale=self._scaler.get_scale())


def fresh_scaler(device: torch.device) -> GradScaler:
    """Return a scaler as it is before the first step."""
    return GradScaler(device.type)


def scaling_of(
    models: Iterable[ShardedModel],
    parameters: Iterable[torch.Tensor],
    scaler: GradScaler,
    device: torch.device,
) -> Scaling:
    """Return how a run scales its loss: as fp16 needs it, if a model that it trains is fp16.

    Args:
        models: all sharded models.
        parameters: those that it trains.
        scaler: the session's.
        device: where gradients are.
    """
    trained = {id(parameter) for parameter in parameters}
    for model in models:
        held = model.named_parameters().values()
        if model.spec.precision == "fp16" and any(id(p) in trained for p in held):
            return Fp16Scaling(scaler, device)
    return NoScaling()
