"""TRACER: what a cell meets in place of cards and values, which are not there.

A cell that says ``cuda`` gets tensors of the host: they are fake, so where they are said to be
changes nothing of what they take. One that reads a number of a floating point tensor, to print it
or to put it into ``metrics``, gets 1.0; a whole number may decide shapes, and is not made up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from fsdp_magic.engine.tracebacks import is_persons

_HERE = torch.device("cpu")
_KEPT = (torch.Tensor.cuda, torch.Tensor.pin_memory)
"""What only moves a tensor."""
_READ: dict[Any, Callable[..., Any]] = {
    torch.Tensor.item: float,
    torch.Tensor.tolist: float,
    torch.Tensor.__float__: float,
    torch.Tensor.__format__: format,
}
"""What reads the number in a tensor, and what it then gives."""
_PLACE_OF_DEVICE = {"to": 1, "_parse_to": 0}
"""Where an index of a card may stand; the second is what ``Module.to`` reads its arguments with."""


class NoCard(TorchFunctionMode):
    """Takes the host wherever a call says a card, and 1.0 where one reads a number.

    Attributes:
        has_given_values: whether a number was read.
    """

    has_given_values = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func is torch.device:  # it only names one
            return func(*args, **kwargs)
        if func in _KEPT:
            return args[0]
        if func in _READ and _is_unknown_number(args[0]):
            self.has_given_values = True
            return _READ[func](1.0, *args[1:])
        if any(map(_is_card, args)):
            args = tuple(_HERE if _is_card(value) else value for value in args)
        place = _PLACE_OF_DEVICE.get(getattr(func, "__name__", ""), len(args))
        if len(args) > place and type(args[place]) is int:
            args = (*args[:place], _HERE, *args[place + 1 :])
        if "device" in kwargs and (_is_card(kwargs["device"]) or type(kwargs["device"]) is int):
            kwargs = {**kwargs, "device": _HERE}
        return func(*args, **kwargs)


def _is_unknown_number(value: Any) -> bool:
    is_fake = isinstance(value, FakeTensor) and value.constant is None
    return is_fake and value.numel() == 1 and value.is_floating_point()


def _is_card(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


@contextmanager
def cards_are_the_host() -> Iterator[None]:
    """Let code that uses a card run inside."""
    with ExitStack() as stack:
        for name, stand_in in _STAND_INS.items():
            genuine = getattr(torch.cuda, name)
            stack.callback(setattr, torch.cuda, name, genuine)
            setattr(torch.cuda, name, _for_persons(stand_in, genuine))
        default = torch.set_default_device
        stack.callback(setattr, torch, "set_default_device", default)
        torch.set_default_device = lambda device: None if _is_card(device) else default(device)
        stack.callback(setattr, nn.Module, "_apply", nn.Module._apply)
        nn.Module._apply = _applied  # type: ignore[method-assign]
        stack.callback(setattr, torch.autocast, "__init__", torch.autocast.__init__)
        torch.autocast.__init__ = _of_host(torch.autocast.__init__)  # type: ignore[method-assign]
        yield


def _of_host(begin: Callable[..., None]) -> Callable[..., None]:
    """Return how an autocast is made that is the host's where a card's is asked for."""

    def begun(cast: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(cast, "cpu" if _is_card(device_type) else device_type, *args, **kwargs)

    return begun


def _applied(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Apply a function to what a module holds, as ``to`` and ``half`` do; parameters stay.

    torch swaps fake parameters, which it refuses where something refers to them weakly, as its
    own fake mode does. Source: ``Module._apply`` in torch/nn/modules/module.py of torch 2.13.
    """
    for child in module.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = function(parameter)
        if changed is not parameter:
            parameter.data = changed
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _for_persons(stand_in: Callable[..., Any], genuine: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers the person's code in one way, libraries in the other.

    Libraries choose operators by what they hear, and there are none for a card here.
    """

    def answered(*args: Any, **kwargs: Any) -> Any:
        asks = sys._getframe(1).f_code.co_filename
        return (stand_in if is_persons(asks) else genuine)(*args, **kwargs)

    return answered


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


_STAND_INS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "cuda",
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
}
"""What the person's code is told of cards."""
