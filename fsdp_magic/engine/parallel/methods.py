"""ENGINE: calls of a sharded model other than its forward: ``vae.decode(z)``, ``model.enc(x)``.

FSDP2 gathers a unit when the unit's own module is called. Here the same is done around the
forward of every part of a unit, around ``model.forward(x)`` without a call, and around the
methods of a person's classes that use parameters directly, when they are called from outside of
the unit's forward. Inside it they are called as they are.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.parallel.blocks import WITHOUT_FORWARD
from fsdp_magic.engine.parallel.class_source import own_functions
from fsdp_magic.engine.parallel.forwards import forward_of, has_layers

_FREED_BEFORE_STEPS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_HOOK: list[RemovableHandle] = []
_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def gather_around_calls(root: nn.Module) -> None:
    """Make every part and method of a sharded model callable by itself."""
    for unit, module in _parts(root):
        _OWNERS[module] = weakref.ref(unit)
        if not isinstance(module, WITHOUT_FORWARD):
            replace(module, "forward", _gathered(unit, module, "forward"))
        for name in direct_methods(module):
            replace(module, name, given_tensors(_gathered(unit, module, name), module, name))
        if module is unit:
            module.register_forward_hook(_free_after_inference)


def forget_calls(root: nn.Module) -> None:
    """Forget which units the parts of a model belong to, as it is to be spread otherwise."""
    for _, module in _parts(root):
        _OWNERS.pop(module, None)
    _FREED_BEFORE_STEPS.discard(root)


def note_calls(root: nn.Module) -> None:
    """Note it again: it is spread as it was."""
    for unit, module in _parts(root):
        _OWNERS[module] = weakref.ref(unit)
    _FREED_BEFORE_STEPS.add(root)


def free_before_steps(root: nn.Module) -> None:
    """Let no optimizer step leave gathered copies of a model's old weights behind.

    A forward with gradients keeps parameters gathered for its backward; if none comes, the next
    forward would use them as they were.
    """
    if not _HOOK:
        _HOOK.append(register_optimizer_step_pre_hook(_free_gathered))
    _FREED_BEFORE_STEPS.add(root)


def _free_gathered(*_: object) -> None:
    for root in list(_FREED_BEFORE_STEPS):
        torch_private.free(root)


def owner(module: nn.Module) -> nn.Module | None:
    """Return the unit that holds a module's own parameters; None if it is not sharded."""
    reference = _OWNERS.get(module)
    return None if reference is None else reference()


def _free_after_inference(module: nn.Module, *_: object) -> None:
    torch_private.free_after_inference(module)


def _parts(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module of which the unit that it belongs to holds a parameter, with the unit."""
    seen: set[int] = set()

    def walk(module: nn.Module, unit: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        unit = module if isinstance(module, FSDPModule) else unit
        if module is unit or _has_own_parameters(module):
            yield unit, module
        for child in module.children():
            yield from walk(child, unit)

    return walk(root, root)


def _has_own_parameters(module: nn.Module) -> bool:
    """Whether a module holds parameters that belong to no unit inside it."""
    return any(parameter is not None for parameter in module._parameters.values()) or any(
        _has_own_parameters(child)
        for child in module.children()
        if not isinstance(child, FSDPModule)
    )


def replace(module: nn.Module, name: str, method: Callable[..., Any]) -> None:
    """Put a function in the place of a method of one module, unless it has its own there."""
    ours = name == "forward" and has_layers(module)
    if isinstance(module, torch.jit.ScriptModule) or (name in vars(module) and not ours):
        return  # it is not ours to replace
    setattr(module, name, types.MethodType(method, module))


def _gathered(unit: nn.Module, module: nn.Module, name: str) -> Callable[..., Any]:
    function = forward_of(module) if name == "forward" else getattr(type(module), name)
    return torch_private.gathered_around(unit, module, function)


def given_tensors(wrapped: Callable[..., Any], module: nn.Module, name: str) -> Any:
    """Return a method that is the wrapped one only for a call with a tensor.

    Without one it is no part of a forward: it may initialise weights in place, or collect the
    parameters for an optimizer, and must see the shards.
    """
    function = getattr(type(module), name)

    @functools.wraps(function)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        return (wrapped if given else function)(self, *args, **kwargs)

    return method


def direct_methods(module: nn.Module) -> list[str]:
    """Return the methods of a person's class that may use parameters without a forward."""
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    children = {name for name, child in module.named_children()}
    below = {
        name
        for child in module.children()
        if not isinstance(child, FSDPModule)
        for part in child.modules()
        for name in part._parameters
    }
    found = []
    for name, function in own_functions(type(module)).items():
        used = _names(function.__code__)
        if name == "forward" or name.startswith("__"):
            continue
        if used & own or (used & children and used & below):
            found.append(name)
    return found


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
