"""ENGINE: micro-steps of a fake model run one after the other, and what each takes logged."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.batches import tensors
from fsdp_magic.engine.micro_step import checked_loss
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.planning.cuda_kernels import cuda_kernels
from fsdp_magic.engine.planning.fake_mode import PlanningMode, known_values
from fsdp_magic.engine.planning.operations import Operations
from fsdp_magic.engine.planning.tracker import Log, Logged, Taken, Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is run.

    Attributes:
        model: of fake parameters.
        batch_of: makes a batch of so many samples.
        loss_of: the cell: the loss of a batch.
        is_cuda: whether CUDA's operators are taken.
    """

    model: nn.Module
    batch_of: Callable[[int], Any]
    loss_of: Callable[[Any], Any]
    is_cuda: bool = False


class Pass(NamedTuple):
    """What one micro-step logged, and what it computed and moved."""

    samples: int
    events: list[Logged]
    operations: Operations


class Passes:
    """Runs micro-steps in the same variables: each frees what the one before has left.

    Args:
        program: what is run.
        cast: parameters by name that are cast while a unit computes.
        heads: names of the modules that are gathered.

    Attributes:
        tracker: counts.
    """

    def __init__(
        self, program: Program, cast: Mapping[str, torch.Tensor], *, heads: Collection[str] = ()
    ) -> None:
        model = program.model
        self._program = program
        self._heads = heads
        self._log = Log()
        ignored = [*model.parameters(), *model.buffers()]
        self.tracker = Tracker(self._log, ignored, cast=cast, is_cuda=program.is_cuda)
        self._cast = cast
        self._batch: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the passes inside; garbage is collected between them only, never within one."""
        was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()  # what is there now need not be looked through after each pass
        gc.disable()
        try:
            with (
                known_values(),
                self.tracker,
                _marks(self._program.model, self._log, self._gradient, self._heads),
                _explained(self._log),
            ):
                yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def run(self, samples: int) -> Pass:
        """Run a micro-step of so many samples."""
        log, program = self._log, self._program
        log.begin()
        log.place, log.is_backward = "", False
        self._next_batch(samples)
        with cuda_kernels() if program.is_cuda else contextlib.nullcontext():
            loss = checked_loss(program.loss_of(self._batch))
            log.mark("backward")
            log.place, log.is_backward = "", True
            torch_private.run_backward(loss)
        del loss
        gc.collect()
        log.mark("micro_step_end")
        done = Pass(samples, log.events, log.operations)
        log.begin()
        return done

    def _next_batch(self, samples: int) -> None:
        """Make a batch while the one before is there, and count it as input."""
        with self.tracker.paused():
            batch = self._program.batch_of(samples)
            mode = active_fake_mode()
            if isinstance(mode, PlanningMode):
                batch = mode.with_values(batch)
        self._log.kind = "input"
        for tensor in tensors(batch):
            self.tracker.add(tensor)
        self._log.kind = None
        self._batch = batch

    def _gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Let a complete gradient be counted by the overlay, and drop it."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise FsdpError(
                f"the gradient of `{name}` is sparse, and a plan is of dense ones, as all ranks "
                "reduce them; build its module with sparse=False"
            )
        if gradient is not None:
            number = self.tracker.hand_over(gradient)
            if name in self._cast:
                _say_whose(self._log.events, number, name)
        self._log.mark("gradient", name)
        parameter.grad = None


def _say_whose(events: list[Logged], number: int, name: str) -> None:
    """Give the event that took a gradient in the parameter's own dtype its kind and place."""
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        if isinstance(event, Taken) and event.id == number:
            events[index] = event._replace(kind="gradient", place=name)
            return


@contextmanager
def _marks(
    model: nn.Module,
    log: Log,
    gradient: Callable[[str, nn.Parameter], None],
    heads: Collection[str],
) -> Iterator[None]:
    """Log inside where forwards begin and end, and where gradients arrive."""
    with contextlib.ExitStack() as hooks:
        for name, part in model.named_modules():
            for handle in _ModuleMarks(name, log, is_head=name in heads).register(part):
                hooks.callback(handle.remove)
        for name, p in model.named_parameters():
            if p.requires_grad:
                handle = p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda p, name=name: gradient(name, p)
                )
                hooks.callback(handle.remove)
        yield


class _ModuleMarks:
    """Logs when one module computes.

    Args:
        name: its dotted name.
        log: what is written to.
        is_head: whether it is gathered, so that it matters when its inputs have their gradients.
    """

    def __init__(self, name: str, log: Log, *, is_head: bool) -> None:
        self._is_head = is_head
        self._name = name
        self._log = log
        self._before: list[str] = []
        """Places around the calls that run."""

    def register(self, module: nn.Module) -> Iterator[Any]:
        """Yield the handles of the hooks that do it."""
        yield module.register_forward_pre_hook(self._begins, prepend=True)
        if self._is_head:
            yield module.register_forward_pre_hook(self._watch_inputs, with_kwargs=True)
        # a computation done again stops by an exception as soon as it has what backward needs
        yield module.register_forward_hook(self._ends, always_call=True)

    def _begins(self, _module: nn.Module, _args: Any) -> None:
        log = self._log
        self._before.append(log.place)
        log.place = self._name
        log.mark("recompute" if log.is_backward else "forward", self._name)

    def _watch_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give a module aliases of its inputs, whose gradients tell when they are there.

        FSDP2 puts a node there too, which begins to reduce a unit
        (``_register_post_backward_hook`` of _fsdp_param_group.py).
        """
        if self._log.is_backward or not torch.is_grad_enabled():
            return None
        return tree_map(self._alias, (args, kwargs))

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        alias = value.view_as(value)
        alias.register_hook(  # type: ignore[no-untyped-call]
            lambda _: self._log.mark("inputs_backward", self._name)
        )
        return alias

    def _ends(self, _module: nn.Module, _args: Any, output: Any) -> None:
        log = self._log
        log.place = self._before.pop()
        log.mark("recompute_end" if log.is_backward else "forward_end", self._name)
        if log.is_backward:
            return
        for leaf in tree_leaves(dict(output) if hasattr(output, "to_tuple") else output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(self._arrives)  # type: ignore[no-untyped-call]

    def _arrives(self, _gradient: torch.Tensor) -> None:
        self._log.place = self._name
        self._log.mark("module_backward", self._name)


@contextmanager
def _explained(log: Log) -> Iterator[None]:
    """Say where the value of a tensor is asked for: tensors have none here."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        where = f"the forward of {log.place}" if log.place else "the cell"
        raise FsdpError(
            f"{where} depends on the values of a tensor ({error.func}), and a plan is made without "
            "any: plan with a part of the model that does not, or measure it with %%fsdp_tune"
        ) from error
