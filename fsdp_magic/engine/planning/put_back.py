"""ENGINE: everything that tracing in the engine itself changes, as it was before.

A fork changes nothing of its parent, but a process that has CUDA cannot take backward in a fork
(``in_bad_autograd_fork`` in torch/csrc/autograd/engine.cpp). There the engine's own models are
un-spread for the time of the trace. No memory is needed for that: shards stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_magic.core.planning.requests import TraceFailed
from fsdp_magic.engine import cells, randomness
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.parallel.unspread import Shape, changes_of
from fsdp_magic.engine.reachable import reachable
from fsdp_magic.engine.state import State


def in_engine(engine: State, work: Callable[[], Any]) -> Any:
    """Return what something gives in this process, or a ``TraceFailed``; all is as before."""
    try:
        with everything_put_back(engine):
            return work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        with cells.forgotten(error):
            return TraceFailed(failure=cells.describe(error))


@contextmanager
def everything_put_back(engine: State) -> Iterator[None]:
    """Have models, optimizers, variables and random states afterwards as before."""
    models = engine.living_models()
    modules = {
        id(module): module
        for model in models
        for module in (*model.module.modules(), *changes_of(model.module).modules)
    }
    shape = Shape(modules.values())
    optimizers = [_Kept(each) for each in reachable(engine.namespace, Optimizer).values()]
    variables = dict(engine.namespace)
    random = randomness.capture()
    try:
        yield
    finally:
        shape.put_back()
        for model in models:
            model.come_back()
        for kept in optimizers:
            kept.put_back()
        engine.namespace.clear()
        engine.namespace.update(variables)
        randomness.restore(random)
        STEPS.reset()


class _Kept:
    """An optimizer's parameters and its state, as they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._held = [list(group["params"]) for group in optimizer.param_groups]
        self._state: dict[torch.Tensor, Any] = dict(optimizer.state)

    def put_back(self) -> None:
        """Be what it was."""
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["params"] = held
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
