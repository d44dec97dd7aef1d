"""ENGINE: calls that a training cell must not make, recognised by the type of their object.

``backward()``, an optimizer's ``step()`` and ``zero_grad()``, a scheduler's ``step()`` belong to
the extension. They are wrapped for the time of a run, where torch defines them, so ``env.step()``
is none of ours, and a call deep inside a person's function is found too. While the cell runs, a
wrapped call is handed to the ``Watcher`` of the run: an automatic step refuses it, a manual one
lets it pass and does what has to follow. At any other time it is the original.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.optimizer_steps import STEPS
from fsdp_magic.engine.parallel import gathering

_CREATE_GRAPH = 4
"""Place of that argument of ``torch.autograd.grad``."""


class Watcher(Protocol):
    """What happens at a call that the guards found in a cell."""

    def backward(self, call: Callable[[], Any]) -> Any:
        """At ``loss.backward()``; ``call`` does it."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Before ``optimizer.step()``."""

    def closure(self, call: Callable[[], Any]) -> Any:
        """At the closure that ``optimizer.step(closure)`` calls."""

    def zero_grad(self, owner: nn.Module | Optimizer, call: Callable[[], Any]) -> Any:
        """At ``zero_grad()`` of a module or an optimizer."""

    def scheduler_step(self, call: Callable[[], Any]) -> Any:
        """At ``scheduler.step()``."""


class Refusing:
    """The watcher of automatic steps: none of these calls is the cell's."""

    def backward(self, call: Callable[[], Any]) -> Any:
        """Refuse."""
        raise _refusal("backward()", "takes `loss` backward itself")

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Refuse."""
        raise _refusal(f"step() of {type(optimizer).__name__}", "steps every optimizer itself")

    def closure(self, call: Callable[[], Any]) -> Any:
        """Never come here: the step was refused."""
        raise AssertionError

    def zero_grad(self, owner: nn.Module | Optimizer, call: Callable[[], Any]) -> Any:
        """Refuse."""
        name = type(owner).__name__.removeprefix("FSDP")  # torch's prefix
        raise _refusal(f"zero_grad() of {name}", "clears gradients itself")

    def scheduler_step(self, call: Callable[[], Any]) -> Any:
        """Refuse."""
        raise _refusal("step() of a scheduler", "steps schedulers itself")


class RefusingInEvaluation:
    """The watcher of evaluations: they change nothing."""

    def backward(self, call: Callable[[], Any]) -> Any:
        """Refuse."""
        raise _refusal_in_evaluation("backward()")

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Refuse."""
        raise _refusal_in_evaluation(f"step() of {type(optimizer).__name__}")

    def closure(self, call: Callable[[], Any]) -> Any:
        """Never come here: the step was refused."""
        raise AssertionError

    def zero_grad(self, owner: nn.Module | Optimizer, call: Callable[[], Any]) -> Any:
        """Refuse."""
        raise _refusal_in_evaluation(f"zero_grad() of {type(owner).__name__}")

    def scheduler_step(self, call: Callable[[], Any]) -> Any:
        """Refuse."""
        raise _refusal_in_evaluation("step() of a scheduler")


class Guards:
    """Wraps the calls while a run goes on.

    Args:
        watcher: of the run.
        schedulers: found in the namespace; their classes are wrapped where they define ``step``.
    """

    def __init__(self, watcher: Watcher, schedulers: Iterable[LRScheduler] = ()) -> None:
        self._watcher = watcher
        self._schedulers = list(schedulers)
        self._watching = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hand calls to the watcher inside: the cell is running."""
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the calls wrapped inside."""
        with ExitStack() as stack:
            for place in (torch.Tensor, torch.autograd):
                stack.enter_context(self._wrapped(place, "backward", self._backward))
            stack.enter_context(_wrapped_grad(self))
            for owner in (nn.Module, Optimizer):
                stack.enter_context(self._wrapped(owner, "zero_grad", self._zero_grad))
            for kind in {_definer(type(s), "step") for s in self._schedulers}:
                stack.enter_context(self._wrapped(kind, "step", self._scheduler_step))
            hook = register_optimizer_step_pre_hook(self._optimizer_step)
            stack.callback(hook.remove)
            yield

    @contextmanager
    def _wrapped(
        self, owner: Any, name: str, instead: Callable[[Callable[[], Any], Any], Any]
    ) -> Iterator[None]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._watching:
                return original(*args, **kwargs)
            return instead(lambda: original(*args, **kwargs), args[0] if args else None)

        setattr(owner, name, call)
        try:
            yield
        finally:
            setattr(owner, name, original)

    @property
    def is_watching(self) -> bool:
        """Whether the cell is running."""
        return self._watching

    # what is called inside a watched call (Tensor.backward calls autograd.backward) is torch's

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._watching = False
        try:
            yield
        finally:
            self._watching = True

    def _backward(self, call: Callable[[], Any], owner: Any) -> Any:
        with self._aside():
            return self._watcher.backward(call)

    def _zero_grad(self, call: Callable[[], Any], owner: Any) -> Any:
        with self._aside():
            return self._watcher.zero_grad(owner, call)

    def _scheduler_step(self, call: Callable[[], Any], owner: Any) -> Any:
        with self._aside():
            return self._watcher.scheduler_step(call)

    def _optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Tell the watcher, and have the closure that was passed go through it."""
        if not self._watching:
            return None
        try:
            with self._aside():
                self._watcher.optimizer_step(optimizer)
        except BaseException:
            STEPS.refused(optimizer)  # it was counted before we were asked
            raise
        itself, *rest = args
        if rest and callable(rest[0]):
            return (itself, functools.partial(self._watcher.closure, rest[0]), *rest[1:]), kwargs
        if callable(kwargs.get("closure")):
            closure = functools.partial(self._watcher.closure, kwargs["closure"])
            return args, {**kwargs, "closure": closure}
        return None


@contextmanager
def _wrapped_grad(guards: Guards) -> Iterator[None]:
    """Refuse gradients of gradients of shards, whose backward needs what is freed by then."""
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        again = kwargs.get("create_graph", len(args) > _CREATE_GRAPH and args[_CREATE_GRAPH])
        if guards.is_watching and again and not gathering.is_held():
            where, line = _line_of_cell()
            raise FsdpError(
                f"{where} takes gradients that are differentiated again{line}; the parameters "
                "must be whole for that: put the lines of the cell into "
                "`with fsdp.unsharded(model):`"
            )
        return original(*args, **kwargs)

    torch.autograd.grad = grad
    try:
        yield
    finally:
        torch.autograd.grad = original


def _definer(kind: type, name: str) -> type:
    """Return the class that defines a method of a class."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _refusal(call: str, instead: str) -> FsdpError:
    where, line = _line_of_cell()
    return FsdpError(
        f"{where} calls {call}, and %%fsdp_train {instead}; delete it{line}, or type --manual for "
        "a cell that does the whole step"
    )


def _refusal_in_evaluation(call: str) -> FsdpError:
    where, line = _line_of_cell()
    return FsdpError(f"{where} calls {call}, and an evaluation changes nothing; delete it{line}")


def _line_of_cell() -> tuple[str, str]:
    """Return which line of the person's code is running, and its text."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<%%"):
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    if frame is None:
        return "the cell", ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"line {frame.f_lineno} of the cell", f": {text}" if text else ""
