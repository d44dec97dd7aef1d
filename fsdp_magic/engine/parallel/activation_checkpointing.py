"""ENGINE: activations computed again in backward instead of being kept.

Around the forward of each unit, or of each repeated block where units are cut otherwise, goes
torch's non-reentrant checkpoint, with the random state of the forward, so that dropout drops the
same. ``selective`` keeps what is dear to compute: attention and every second matrix product. What
a forward changes besides its output must not be changed twice: running statistics and the caches
of decoders are set aside while it is computed again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel.blocks import repeated_blocks
from fsdp_magic.engine.parallel.forwards import Forward, Order, lay_around
from fsdp_magic.engine.parallel.precision import has_statistics

_ATEN = torch.ops.aten
_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default})
_KEPT = frozenset(
    {
        *_PRODUCTS,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
"""Source: torchtitan (distributed/activation_checkpoint.py) saves these, and every second mm."""
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def apply(module: nn.Module, units: Sequence[tuple[nn.Module, ...]], spec: ModelSpec) -> list[str]:
    """Let a model compute activations again in backward, in place, if it was asked for.

    Args:
        module: the model, before it is sharded.
        units: what is gathered at once.
        spec: how.

    Returns:
        Sentences a person should read.
    """
    kind = spec.activation_checkpointing
    if not kind:
        return []
    blocks = _checkpointed(module, units)
    by_themselves = [b for b in blocks if getattr(b, "gradient_checkpointing", False)]
    for block in blocks:
        if block not in by_themselves:
            _apply_to(block, spec)
    _without_caches(module)
    if not blocks:
        return [
            "--activation-checkpointing does nothing here: the model has no repeated blocks, and "
            "to compute all of it again saves no memory"
        ]
    if by_themselves:  # transformers' gradient_checkpointing_enable
        return [f"{len(by_themselves)} blocks checkpoint themselves already, and are left to it"]
    return []


def _checkpointed(module: nn.Module, units: Sequence[tuple[nn.Module, ...]]) -> list[nn.Module]:
    """Return the repeated blocks of a model; if there are none, the units below its root."""
    return repeated_blocks(module) or [m for unit in units for m in unit if m is not module]


def _apply_to(block: nn.Module, spec: ModelSpec) -> None:
    selective = str(spec.activation_checkpointing) == "selective"
    if selective and spec.compile:  # the compiler must see which outputs are kept
        order, contexts = Order.CHECKPOINTED_INSIDE, _selective
    else:
        order = Order.CHECKPOINTED
        contexts = _selective if selective else _plain
    lay_around(block, order, functools.partial(_checkpointing, contexts, order))


def _checkpointing(contexts: Callable[[], Contexts], order: Order, function: Forward) -> Forward:
    """Return a forward that computes its activations again in backward."""

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(self, *args, **kwargs)
        if order is Order.CHECKPOINTED_INSIDE:
            return checkpoint(
                function, self, *args, use_reentrant=False, context_fn=contexts, **kwargs
            )
        run = _Runs(function, self, args, kwargs)
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_with_statistics_aside, self, contexts),
            **kwargs,
        )

    return forward


class _Runs:
    """The first run of a forward, and those that compute it again, with the caches as they were."""

    def __init__(
        self, function: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        self._module = module
        self._is_first = True
        self._caches = {
            id(value): _as_it_is(value) for value in (*args, *kwargs.values()) if _is_cache(value)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run."""
        if self._caches and not self._is_first:
            args = tuple(self._before(value) for value in args)
            kwargs = {name: self._before(value) for name, value in kwargs.items()}
        self._is_first = False
        return self._function(self._module, *args, **kwargs)

    def _before(self, value: Any) -> Any:
        """Return a cache as it was before the first run; anything else as it is."""
        kept = self._caches.get(id(value))
        return value if kept is None else _as_it_is(kept)


def _is_cache(value: Any) -> bool:
    """Return whether a value is a cache of keys and values, as transformers has them."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def _as_it_is(cache: Any) -> Any:
    """Return a copy of a cache with the same tensors, which are replaced and not written to."""
    kept = copy.copy(cache)
    for name, value in vars(kept).items():
        if _is_cache(value):
            setattr(kept, name, _as_it_is(value))
        elif isinstance(value, list):
            setattr(kept, name, [copy.copy(layer) for layer in value])
        elif isinstance(value, dict):
            setattr(kept, name, dict(value))
    return kept


def _without_caches(module: nn.Module) -> None:
    """Let a transformers model fill no cache in a forward with gradients.

    Nothing reads it in training, and it would keep what is computed again.
    """
    if any(_uses_cache(part) for part in module.modules()):
        lay_around(module, Order.CHECKPOINTED, _caching_nothing)


def _caching_nothing(function: Forward) -> Forward:
    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(self, *args, **kwargs)
        configs = {id(c): c for part in self.modules() if (c := _uses_cache(part)) is not None}
        try:
            for config in configs.values():
                config.use_cache = False
            return function(self, *args, **kwargs)
        finally:
            for config in configs.values():
                config.use_cache = True

    return forward


def _uses_cache(module: nn.Module) -> Any:
    """Return the configuration of a module if it says that a cache is filled."""
    config = getattr(module, "config", None)
    return config if getattr(config, "use_cache", None) is True else None


def _plain() -> Contexts:
    return contextlib.nullcontext(), contextlib.nullcontext()


def _selective() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(_KeepsHalf())  # type: ignore[no-untyped-call]
    return contexts


class _KeepsHalf:
    """Keeps attention and every second matrix product; counted alike in both runs."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        """Return whether an operation's output is kept."""
        if operation in _PRODUCTS:
            self._products[context.is_recompute] += 1
            if self._products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return (
            CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
        )


def _with_statistics_aside(module: nn.Module, contexts: Callable[[], Contexts]) -> Contexts:
    first, again = contexts()
    # what keeps outputs must not see the copies that are made
    return first, _both(_statistics_aside(module), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _statistics_aside(module: nn.Module) -> Iterator[None]:
    """Let running statistics be updated in copies inside: the forward has updated them."""
    parts = [part for part in module.modules() if has_statistics(part)]
    kept = [(part, dict(part._buffers)) for part in parts]
    try:
        for part, buffers in kept:
            part._buffers.update(
                {name: None if b is None else b.clone() for name, b in buffers.items()}
            )
        yield
    finally:
        for part, buffers in kept:
            part._buffers.update(buffers)
