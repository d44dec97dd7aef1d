"""TRACER: the person's cell run without memory, and what of it is traced."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import Optimizer

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.wording import nearest
from fsdp_magic.engine import cell_sources, cells
from fsdp_magic.engine.guards import Guards, Refusing
from fsdp_magic.engine.micro_step import checked_loss
from fsdp_magic.engine.optimizers import parameters_of
from fsdp_magic.engine.planning.batches import (
    WRITE_LOSS,
    DefaultBatch,
    default_batch,
    transformer_of,
)
from fsdp_magic.engine.tracebacks import persons_traceback

_NO_NUMPY = ".numpy() is not supported for tensor subclasses"
"""What torch says of a fake tensor. Source: ``THPVariable_numpy`` of torch 2.13."""
_OF_TRAINING = ("batch", "step", "micro_step", "epoch", "micro_batch_size", "total_steps")
"""Names that training cells have and the cell of a plan has not."""
_NO_INPUT = "EOF when reading a line"
"""What ``input()`` says without any. Source: ``builtin_input_impl`` of Python/bltinmodule.c."""


class NoValuesError(Exception):
    """The cell reads what a tensor holds, which decides how it goes on."""


@dataclass(slots=True, kw_only=True)
class Described:
    """What is traced.

    Attributes:
        model: its parameters become fake.
        optimizers: that hold parameters of it.
        make_batch: samples -> batch.
        loss_of: batch -> loss.
        notes: sentences a person should read.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    make_batch: Callable[[int], Any]
    loss_of: Callable[[Any], torch.Tensor]
    notes: list[str] = field(default_factory=list)


class _PlainShell:
    """Stands for IPython's shell: the cell is plain Python."""

    def transform_cell(self, code: str) -> str:
        """Return a cell as it is.

        Raises:
            FsdpError: if it holds a magic or a command.
        """
        try:
            ast.parse(code)
        except SyntaxError as error:
            line = (error.text or "").lstrip()
            if line.startswith(("%", "!")):
                raise FsdpError(
                    f"line {error.lineno} is a magic or a command; the cell of a plan is plain "
                    "Python that runs in a process of its own: put it into another cell"
                ) from None
        return code


def namespace_of_cell(code: str, name: str) -> dict[str, Any]:
    """Run a cell in a module of its own, and return what it bound.

    Args:
        code: the cell.
        name: its file name in tracebacks.
    """
    cell_sources.install()
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    namespace = vars(module)
    namespace.update(device=torch.device("cpu"), rank=0, world_size=1, dp_rank=0, dp_size=1)
    cell = cells.compile_cell(code, name, shell=_PlainShell())
    with values_explained(), _missing_explained(), _input_refused():
        cell.run(namespace)
    return namespace


def program_in(namespace: dict[str, Any], *, sequence_length: int | None) -> Described:
    """Return the program that names describe.

    Args:
        namespace: of the cell.
        sequence_length: tokens of a sample of the default batch; None: as the model says.

    Raises:
        FsdpError: if something is missing; it says what to write.
    """
    model = _model(namespace)
    notes: list[str] = []
    optimizers = _optimizers(namespace, model)
    if not optimizers:
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise FsdpError("no parameter of `model` requires grad, so there is nothing to train")
        optimizers = [torch.optim.AdamW(trained)]
        notes.append("the cell binds no optimizer: torch.optim.AdamW(model.parameters())")
    default: DefaultBatch | None = None
    make_batch = _function(namespace, "example_batch", "example_batch(b)")
    if make_batch is None:
        default = default_batch(model, sequence_length)
        make_batch = default.make
        notes.append(default.note)
    elif sequence_length is not None:
        notes.append("--seq-len is for batches of the planner's; example_batch makes the cell's")
    loss_fn = _function(namespace, "loss_fn", "loss_fn(model, batch)") or _default_loss(model)
    guessed = "" if default is None else default.note
    guards = Guards(Refusing())

    def loss_of(batch: Any) -> torch.Tensor:
        with (
            guards.in_place(),
            guards.watching(),
            values_explained(),
            _missing_explained(),
            _guess_told(guessed),
        ):
            loss = loss_fn(model, batch)
        if loss is None:
            raise FsdpError("loss_fn returns nothing; end it with: return loss")
        return checked_loss(loss)

    return Described(
        model=model, optimizers=optimizers, make_batch=make_batch, loss_of=loss_of, notes=notes
    )


@contextmanager
def values_explained() -> Iterator[None]:
    """Say why a value cannot be read, where code wants one."""
    try:
        yield
    except (DataDependentOutputException, RuntimeError) as error:
        wants_value = isinstance(error, DataDependentOutputException) or _NO_NUMPY in str(error)
        if not wants_value or not persons_traceback(error):
            raise
        raise NoValuesError(
            "a plan computes shapes and no values, so what a tensor holds cannot be read; let "
            "metrics be tensors, and take .item(), .tolist(), .numpy(), `if tensor:` out of what "
            "runs for each batch"
        ).with_traceback(error.__traceback__) from None


@contextmanager
def _input_refused() -> Iterator[None]:
    """Say that nobody answers, where the cell asks for input."""
    try:
        yield
    except EOFError as error:
        if str(error) != _NO_INPUT:
            raise
        raise FsdpError(
            "the cell asks for input(), and nobody can answer the process that plans it; write "
            "the value into the cell"
        ) from None


@contextmanager
def _guess_told(guessed: str) -> Iterator[None]:
    """Say that a batch was the planner's own, where a model fails on it; empty: it was not."""
    try:
        yield
    except Exception as error:
        if guessed and not isinstance(error, FsdpError):
            error.add_note(f"{guessed}: the planner's own batch; example_batch(b) makes another")
        raise


@contextmanager
def _missing_explained() -> Iterator[None]:
    """Say what the cell of a plan has, where it takes names of other cells."""
    try:
        yield
    except NameError as error:
        error.add_note(
            "The cell of a plan only builds the model; what a training cell does with a batch "
            "is a function of it: def loss_fn(model, batch): return ..."
            if error.name in _OF_TRAINING
            else "The cell of a plan runs in a process of its own, without the names of other "
            "cells; import and define what it uses in it"
        )
        raise


def _model(namespace: dict[str, Any]) -> nn.Module:
    model = namespace.get("model")
    if isinstance(model, nn.Module):
        return model
    if model is not None:
        raise FsdpError(
            f"`model` is a {type(model).__name__}; the cell of a plan binds a torch.nn.Module to it"
        )
    modules = [name for name, value in namespace.items() if isinstance(value, nn.Module)]
    near = nearest("model", modules) or next(iter(modules), None)
    raise FsdpError("the cell binds no `model`; add: model = " + (near or "MyModel()"))


def _optimizers(namespace: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    held = {id(p) for p in model.parameters()}
    found = {
        id(value): (name, value)
        for name, value in namespace.items()
        if isinstance(value, Optimizer)
    }
    for name, optimizer in found.values():
        others = [p for p in parameters_of(optimizer) if id(p) not in held]
        if others:
            raise FsdpError(
                f"`{name}` holds {len(others):,} parameter{'s' if len(others) > 1 else ''} "
                f"({sum(p.numel() for p in others):,} elements) that are not of `model`, and a "
                "plan is of one module; put all that is trained into one nn.Module `model`, or "
                f"del {name}"
            )
    return [optimizer for _, optimizer in found.values()]


def _function(namespace: dict[str, Any], name: str, call: str) -> Callable[..., Any] | None:
    function = namespace.get(name)
    if function is not None and not callable(function):
        raise FsdpError(
            f"`{name}` is a {type(function).__name__}; it is a function, called as {call}"
        )
    return function


def _default_loss(model: nn.Module) -> Callable[[nn.Module, Any], Any]:
    if transformer_of(model) is None:
        kind = type(model).__name__
        raise FsdpError(f"nothing says what the loss of {kind} is; {WRITE_LOSS}")

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = getattr(model(**batch), "loss", None)
        if loss is None:
            kind = type(model).__name__
            raise FsdpError(f"{kind} computes no loss by itself; {WRITE_LOSS}")
        return loss

    return loss_fn
