"""ENGINE: what is put in eval mode while a cell is evaluated, and put back afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

_TRAIN_MODE = "train_mode"
"""Where an optimizer with two modes keeps which one it is in. Source: schedule-free optimizers,
which keep it in every group."""


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Have modules and optimizers in eval mode inside, and each as it was afterwards.

    The mode is set part by part, since a module's own ``eval()`` may do more than that.
    """
    parts = {id(part): part for module in modules for part in module.modules()}
    modes = [(part, part.training) for part in parts.values()]
    with ExitStack() as stack:
        stack.callback(_put_back, modes)
        for part, _ in modes:
            part.training = False
        for optimizer in optimizers:
            if has_modes(optimizer) and _is_training(optimizer):
                switched: Any = optimizer
                switched.eval()
                stack.callback(switched.train)
        yield


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a train and an eval mode, as schedule-free ones have."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def average_running_statistics(modules: Iterable[nn.Module], world_size: int) -> None:
    """Average what BatchNorm layers have gathered on each rank.

    Collective: every rank must call this.
    """
    for module in modules:
        for part in module.modules():
            if not isinstance(part, _BatchNorm):
                continue
            for statistic in (part.running_mean, part.running_var):
                if statistic is not None:
                    dist.all_reduce(statistic)
                    statistic /= world_size


def _put_back(modes: list[tuple[nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training


def _is_training(optimizer: Optimizer) -> bool:
    return all(group.get(_TRAIN_MODE, True) for group in optimizer.param_groups)
