"""ENGINE: one run of a training or evaluation cell: names bound, the cell executed, its names read.

What a cell may bind is cleared before each run, so that nothing of an earlier one is taken for
its result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.wording import nearest
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.guards import Guards
from fsdp_magic.engine.interrupts import INTERRUPTS
from fsdp_magic.engine.names import Names
from fsdp_magic.engine.weights import Weight, number_of

BINDABLE = ("loss", "metrics", "loss_weight", "collect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a cell bound.

    Attributes:
        loss: as it is, with its graph.
        weight: ``loss_weight``.
        metrics: numbers, or 0-dim tensors on the device.
        collect: rows per sample.
    """

    loss: Any = None
    weight: Weight | None = None
    metrics: dict[str, Weight] = field(default_factory=dict)
    collect: dict[str, Any] = field(default_factory=dict)


class CellRunner:
    """Runs a compiled cell.

    Args:
        cell: compiled once.
        names: of the namespace it runs in.
        guards: hand calls of the cell to whoever watches.
    """

    def __init__(self, cell: Cell, names: Names, guards: Guards) -> None:
        self.cell = cell
        self._names = names
        self._guards = guards

    def run(self, values: Mapping[str, Any]) -> Bound:
        """Run the cell once and return what it bound; ``loss`` stays in the namespace, detached.

        Args:
            values: names that the cell finds.
        """
        namespace = self._names.namespace
        self._names.bind(values)
        for name in BINDABLE:
            namespace.pop(name, None)
        with INTERRUPTS.allowed(), self._guards.watching(), _explained():
            self.cell.run(namespace)
        loss, weight = namespace.get("loss"), namespace.get("loss_weight")
        if isinstance(loss, torch.Tensor):
            namespace["loss"] = loss.detach()
        return Bound(
            loss=loss,
            weight=None if weight is None else number_of(weight),
            metrics=_checked_metrics(namespace.get("metrics")),
            collect=_checked_collect(namespace.get("collect")),
        )


def checked_loss(loss: Any, *, assigned: Collection[str] = ()) -> torch.Tensor:
    """Return a loss that can be taken backward, as a 0-dim tensor.

    Args:
        loss: what the cell bound.
        assigned: the names that it binds.

    Raises:
        FsdpError: if the cell bound none, or something that has no backward.
    """
    if loss is None:
        near = nearest("loss", (name for name in assigned if name != "loss"))
        meant = f"`{near}` is another name; " if near else ""
        raise FsdpError(
            f"the cell binds no `loss`; {meant}end it with a line such as: loss = model(batch)"
        )
    scalar = scalar_loss(loss)
    if not scalar.requires_grad:
        raise FsdpError(
            "`loss` does not require grad, so there is nothing to train; compute it outside "
            "torch.no_grad() and without .detach() or .item()"
        )
    return scalar


def scalar_loss(loss: Any) -> torch.Tensor:
    """Return a loss as a 0-dim tensor.

    Raises:
        FsdpError: if it is not one number, or a rank's part of one.
    """
    if not isinstance(loss, torch.Tensor):
        raise FsdpError(f"`loss` is a {type(loss).__name__}; it must be a tensor of one element")
    if isinstance(loss, DTensor):
        raise FsdpError(
            "`loss` is made of sharded parameters directly, which adds up each rank's part only; "
            "put such a term into the model's forward"
        )
    if loss.numel() != 1:
        raise FsdpError(
            f"`loss` has shape {tuple(loss.shape)}; it must have one element: loss = loss.mean()"
        )
    return loss.reshape(())


@contextmanager
def _explained() -> Iterator[None]:
    """Say why a name of the person's own is not there, if the cell looks for it."""
    try:
        yield
    except NameError as error:
        if error.name in BINDABLE:
            error.add_note(
                f"`{error.name}` is a name that this cell binds, so it is cleared before each "
                "run of it; give a function or value of yours another name"
            )
        raise


def _checked_metrics(metrics: Any) -> dict[str, Weight]:
    """Return the metrics that a cell bound, detached.

    Raises:
        FsdpError: if they are not numbers by name.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise FsdpError(
            f"`metrics` is a {type(metrics).__name__}; it is a dict of numbers: "
            'metrics = {"accuracy": correct.float().mean()}'
        )
    return {str(name): _metric(str(name), value) for name, value in metrics.items()}


def _metric(name: str, value: Any) -> Weight:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach().reshape(())
        return value if value.device.type != "cpu" else float(value)
    if hasattr(value, "item") and not isinstance(value, torch.Tensor):  # a numpy scalar
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return float(value)
    what = (
        f"has shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else (f"is a {type(value).__name__}")
    )
    raise FsdpError(f"metrics[{name!r}] {what}; it is a number or a tensor of one element")


def _checked_collect(collect: Any) -> dict[str, Any]:
    if collect is None:
        return {}
    if not isinstance(collect, Mapping):
        raise FsdpError(
            f"`collect` is a {type(collect).__name__}; it is a dict with one row per sample: "
            'collect = {"prediction": logits.argmax(-1)}'
        )
    return dict(collect)
