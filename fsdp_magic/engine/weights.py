"""ENGINE: what each micro-batch counts in the loss and gradient of the global batch.

The loss of a step is the weighted mean of its micro-batches' losses over all ranks. The weights
are the number of samples, with ``--loss tokens`` the number of labels, or what the cell binds as
``loss_weight``. The first two are known before the first forward, so backward runs on
``loss * w / W``. With ``loss_weight`` the sum W is only known at the end: backward runs on
``loss * w``, and the gradient is divided by W once. ``--loss sum`` adds losses up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs.train import LossKind, TrainSpec
from fsdp_magic.engine.cells import Cell
from fsdp_magic.engine.data import StepBatches
from fsdp_magic.engine.parallel.sharded_model import ShardedModel

IGNORED_LABEL = -100
"""Source: ``ignore_index`` of torch.nn.functional.cross_entropy."""

_UNSHIFTED = {"XLMWithLMHeadModel", "FlaubertWithLMHeadModel", "XLNetLMHeadModel"}
"""Listed as causal, but they take labels as they are. Source: their ``forward``."""

Weight = float | torch.Tensor
"""What one micro-batch counts: a number, or a number on the device that nobody waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one rank's micro-batches in a step.

    Attributes:
        counts: of each, as far as they are known before the step.
        total: of all ranks; None: the cell binds ``loss_weight``, and the step adds them up.
    """

    counts: list[int]
    total: int | None

    def factor(self, micro_step: int) -> float:
        """Return what a micro-batch's loss is multiplied by before backward."""
        count = self.counts[micro_step]
        if self.total is None:
            return float(count)
        return count / self.total if self.total else 0.0


class Weighing:
    """How the batches of a run are weighed.

    Args:
        kind: what the cell's loss is of its batch.
        late: whether the cell binds ``loss_weight``.
        shifted: whether what is trained drops the first label of each row.
    """

    def __init__(self, kind: LossKind, *, late: bool, shifted: bool = False) -> None:
        if kind == "sum" and late:
            raise FsdpError(
                "--loss sum adds losses up, and loss_weight is for means; leave one of them out"
            )
        self._kind = kind
        self.late = late
        self._shifted = shifted

    def known(self, batches: StepBatches) -> list[int | None]:
        """Return what each micro-batch counts as far as the batch says it; None: it does not.

        Raises:
            FsdpError: if labels are to be counted and the batch has none.
        """
        if self._kind == "sum":
            return [1] * len(batches.batches)
        if self._kind == "mean":
            return batches.counts
        if None in batches.labels and not self.late:
            raise FsdpError(
                '--loss tokens counts batch["labels"], and the batch has none; bind loss_weight '
                "in the cell instead: loss_weight = number of tokens the mean runs over"
            )
        return batches.labels

    @property
    def count_labels(self) -> Callable[[Any], int | None] | None:
        """What counts the labels of a batch; None where nobody asks for them."""
        if self._kind != "tokens":
            return None
        return lambda batch: label_count(batch, shifted=self._shifted)

    @property
    def adds(self) -> bool:
        """Whether losses are added up, not averaged."""
        return self._kind == "sum"

    def of_batch(self, count: int | None, labels: int | None) -> float:
        """Return what a batch counts by itself; one that cannot say counts one."""
        if self._kind == "sum":
            return 1.0
        known = labels if self._kind == "tokens" else count
        return 1.0 if known is None else float(known)

    def agreed(self, counts: list[int | None], total: int, *, counted: bool) -> Weights:
        """Return the weights once all ranks have added up what they know.

        Args:
            counts: what this rank's micro-batches count.
            total: of all ranks.
            counted: whether every micro-batch of every rank said what it counts; else each
                counts one.
        """
        if self._kind == "sum":
            return Weights(counts=[1] * len(counts), total=1)
        if not counted:
            ones = [1] * len(counts)
            return Weights(counts=ones, total=None if self.late else total)
        known = [count or 0 for count in counts]
        return Weights(counts=known, total=None if self.late else total)


def label_count(batch: Any, *, shifted: bool) -> int | None:
    """Return over how many labels the mean loss of a batch runs; None if it has none.

    Args:
        batch: a mapping with ``labels``, or an object with that attribute.
        shifted: whether the model drops the first label of each row, as causal language models
            do.
    """
    if isinstance(batch, tuple):
        counts = [c for part in batch if (c := label_count(part, shifted=shifted)) is not None]
        return sum(counts) if counts else None
    labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    if not isinstance(labels, torch.Tensor):
        return None
    counted = labels[..., 1:] if shifted else labels
    return int((counted != IGNORED_LABEL).sum())


def shifts_labels(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules is a causal language model of ``transformers``.

    Source: the lists of transformers' auto classes; ``ForCausalLMLoss``, which theirs use, shifts.
    """
    classes = {
        kind for module in modules for part in module.modules() for kind in type(part).__mro__
    }
    names = {kind.__name__ for kind in classes if kind.__module__.startswith("transformers.")}
    return bool(names) and not names.isdisjoint(_shifting_names())


@cache
def _shifting_names() -> frozenset[str]:
    from transformers.models.auto import modeling_auto as auto

    names: set[str] = set()
    for listed in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for name in listed.values():
            names.update([name] if isinstance(name, str) else name)
    return frozenset(names - _UNSHIFTED)


def number_of(weight: Any) -> Weight:
    """Return the ``loss_weight`` that a cell bound, checked as far as the host can see it.

    Raises:
        FsdpError: if it is no number from 0.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise FsdpError(
                f"`loss_weight` has shape {tuple(weight.shape)}; it is one number: how many items "
                "the mean loss runs over"
            )
        number: torch.Tensor = weight.detach().reshape(())
        if number.device.type != "cpu":
            return number
        weight = number.item()
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
        raise FsdpError(
            f"`loss_weight` is {weight!r}; it is a number from 0: how many items the mean loss "
            "runs over"
        )
    return float(weight)


def weighing_of(
    cell: Cell, trained: Iterable[torch.Tensor], models: Iterable[ShardedModel], spec: TrainSpec
) -> Weighing:
    """Return how batches are weighed; labels as the models count them that are trained.

    Raises:
        FsdpError: if a manual cell binds a weight.
    """
    late = "loss_weight" in cell.assigned
    if late and spec.manual:
        raise FsdpError(
            "loss_weight is for cells whose backward is the extension's; with --manual weigh "
            "the loss in the cell"
        )
    held = set(map(id, trained))
    named = ((m.module, m.named_parameters().values()) for m in models)
    learning = [module for module, each in named if any(id(p) in held for p in each)]
    shifted = spec.loss == "tokens" and shifts_labels(learning)
    return Weighing(spec.loss, late=late, shifted=shifted)
