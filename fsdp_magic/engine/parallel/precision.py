"""ENGINE: computing in bf16 or fp16, with one meaning under every strategy.

Weights and gradients stay as the model was made (in fp32). While a unit computes, low-precision
copies of its parameters stand in their places, and what it is given is cast; gradients arrive at
the parameters in fp32 and are reduced so. What the model returns is cast to fp32, so that a loss
made of it, and the beginning of backward, are not rounded to the few digits of bf16. Three things
are not cast: integers, scalars, and layers with running statistics (BatchNorm), which compute in
the dtype that they were made in.

FSDP2 gathers the copies (``fsdp_policy``); where parameters are whole, ``casting.py`` makes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import torch_private
from fsdp_magic.engine.world import World

_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
OUTPUT_DTYPE = torch.float32
_HOOKS: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def compute_dtype(spec: ModelSpec) -> torch.dtype | None:
    """Return what a model computes in; None: in the dtype that it was made in."""
    return _DTYPES.get(spec.precision)


def refuse_unfit(spec: ModelSpec, world: World) -> None:
    """Raise if the device does not compute in the precision that was asked for.

    Raises:
        FsdpError: saying which to take instead.
    """
    if spec.precision != "bf16" or world.device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        card = torch.cuda.get_device_name(world.device)
        raise FsdpError(
            f"{card} does not compute in bf16 (cards since Ampere do); type --precision fp16"
        )


def fsdp_policy(spec: ModelSpec, *, is_root: bool) -> MixedPrecisionPolicy:
    """Return how FSDP2 gathers, casts and reduces a unit."""
    dtype = compute_dtype(spec)
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        output_dtype=OUTPUT_DTYPE if is_root else None,
        cast_forward_inputs=True,
    )


def kept_as_made(module: nn.Module, spec: ModelSpec) -> set[nn.Parameter]:
    """Return the parameters of layers with running statistics, which are not cast.

    They are small, so FSDP2 leaves them whole on every rank.
    """
    if compute_dtype(spec) is None:
        return set()
    return {p for part in module.modules() if has_statistics(part) for p in part.parameters()}


def has_statistics(module: nn.Module) -> bool:
    """Return whether a layer normalises by running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def castable(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module's own that are cast, by attribute."""
    if has_statistics(module):
        return
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.ndim == 0 or parameter.numel() == 0:
            continue
        if parameter.is_floating_point():
            yield name, parameter


def cast_inputs(module: nn.Module, spec: ModelSpec) -> list[str]:
    """Let every part of a model take floating inputs of any dtype, in place.

    A mask or a position table in fp32 makes what it is added to fp32. Units cast what they are
    given; so does every part with parameters, so that no result depends on how units are cut.

    Returns:
        Sentences a person should read.
    """
    for part in module.modules():
        for handle in _HOOKS.pop(part, ()):  # of an attempt that was refused
            handle.remove()
    dtype = compute_dtype(spec)
    if dtype is None:
        return []
    with_statistics = 0
    for part in module.modules():
        if has_statistics(part):
            with_statistics += 1
            made = next(part.parameters(), next(part.buffers()))
            _HOOKS[part] = [
                part.register_forward_pre_hook(_casting(made.dtype), with_kwargs=True),
                part.register_forward_hook(_casting_back(dtype)),
            ]
        elif any(True for inner in part.modules() for _ in castable(inner)):
            _HOOKS[part] = [part.register_forward_pre_hook(_casting(dtype), with_kwargs=True)]
    if not with_statistics:
        return []
    layers = "1 layer" if with_statistics == 1 else f"{with_statistics} layers"
    keep = "computes" if with_statistics == 1 else "compute"
    return [
        f"{layers} with running statistics (BatchNorm) {keep} as made, not in {spec.precision}, "
        "and every rank holds them whole"
    ]


def _casting(dtype: torch.dtype) -> Any:
    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(_differs(value, dtype) for value in (*args, *kwargs.values())):
            return None
        return torch_private.cast_floating(args, dtype), torch_private.cast_floating(kwargs, dtype)

    return cast


def _casting_back(dtype: torch.dtype) -> Any:
    def cast(_: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return torch_private.cast_floating(output, dtype)

    return cast


def _differs(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
