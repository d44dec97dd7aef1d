"""ENGINE: fake CPU tensors computed by the operators that CUDA would take.

torch chooses some operators by the device of a tensor, and they keep different things for
backward. A plan for a GPU must not depend on the machine that makes it, so those choices are made
here as for CUDA; all others are the same on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_ATEN = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_ALIGNED_HEAD = 8
_LARGEST_FUSED_HEAD = 256
"""Source: ``check_head_dim_size_flash`` and the padding in aten/src/ATen/native/transformers/
{cuda/sdp_utils.cpp,attention.cpp}."""


class CudaKernels(TorchFunctionMode):
    """Takes CUDA's operators where the choice is torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or what it is on CUDA."""
        kwargs = dict(kwargs or {})
        choice = _CHOICES.get(func)
        if choice is not None:
            return choice(func, args, kwargs)
        if func in _FULL_PRECISION and torch.is_autocast_enabled("cpu"):
            args, kwargs = _in_float32(args), _in_float32(kwargs)
        return func(*args, **kwargs)


def _dropout(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Keep a mask of one byte an element instead of one of the input's dtype.

    Source: ``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp.
    """
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    if not training or not 0 < p < 1 or given.get("inplace", False):
        return func(*args, **kwargs)
    return torch.native_dropout(given["input"], p, True)[0]


def _attention(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Keep the output and a logarithm a row instead of the matrix of weights.

    Flash attention takes halves without a mask, memory-efficient attention the rest.
    Source: ``priority_order`` and ``use_*_attention`` in aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp; masks: ``convert_boolean_attn_mask`` in ../attention.cpp.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value, mask = (given.get(name) for name in names[:4])
    p, causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
    assert isinstance(query, torch.Tensor)
    if query.ndim != 4 or query.shape[-1] > _LARGEST_FUSED_HEAD:
        return func(*args, **kwargs)
    heads = _aligned(query, key, value)
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    if mask is None and query.dtype in _HALVES:
        attended = _ATEN._scaled_dot_product_flash_attention(*heads, p, causal, scale=scale)[0]
    else:
        bias = None if mask is None else _bias(mask, query, heads[1])
        heads = _as_many_heads(*heads)
        attended = _ATEN._scaled_dot_product_efficient_attention(
            *heads, bias, torch.is_grad_enabled(), p, causal, scale=scale
        )[0]
    return attended[..., : query.shape[-1]]


def _aligned(*heads: Any) -> tuple[torch.Tensor, ...]:
    short = -heads[0].shape[-1] % _ALIGNED_HEAD
    return tuple(F.pad(head, (0, short)) for head in heads) if short else heads


def _as_many_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Repeat keys and values of grouped queries: only flash attention takes them as they are."""
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return query, key, value
    return query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as what is added to the products."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _rms_norm(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Keep the input and one number a row.

    Source: ``rms_norm`` in aten/src/ATen/native/layer_norm.cpp.
    """
    names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    weight = given.get("weight")
    if weight is not None and weight.dtype != given["input"].dtype:
        return func(*args, **kwargs)
    return _FusedRmsNorm.apply(given["input"], weight, len(given["normalized_shape"]))  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """Takes and keeps what CUDA's kernel does, and computes nothing.

    torch takes the operator apart where there is no card, and autograd then keeps more.
    Source: ``_fused_rms_norm`` in native_functions.yaml and tools/autograd/derivatives.yaml.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor | None, dims: int) -> Any:
        """Return what the norm returns, and keep the reciprocal of each row's root."""
        rows = (*given.shape[: given.ndim - dims], *(1,) * dims)
        kept = torch.promote_types(given.dtype, torch.float32)
        ctx.save_for_backward(given, weight, given.new_empty(rows, dtype=kept))
        return torch.empty_like(given)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Return gradients of the input and of the weight, as far as they are wanted."""
        given, weight, _ = ctx.saved_tensors
        wanted = zip((given, weight), ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(each) if wants else None for each, wants in wanted), None


_CHOICES: Mapping[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
_FULL_PRECISION = frozenset(
    {
        F.softmax,
        F.log_softmax,
        F.layer_norm,
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        torch.softmax,
        torch.log_softmax,
        torch.layer_norm,
        torch.pow,
        torch.rsqrt,
        torch.exp,
        torch.log,
        torch.sum,
        torch.norm,
        torch.cumsum,
        torch.Tensor.softmax,
        torch.Tensor.log_softmax,
        torch.Tensor.pow,
        torch.Tensor.__pow__,
        torch.Tensor.sum,
        torch.Tensor.norm,
    }
)
"""What autocast computes in fp32 on CUDA. Source: ``AT_FORALL_FP32`` in aten/src/ATen/
autocast_mode.h; the CPU's list is another."""


def _in_float32(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in _HALVES else t, value)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Take CUDA's operators inside, and its autocast for any."""
    init = torch.autocast.__init__

    def on_any_device(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and not args and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float16}  # CUDA's own default
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = on_any_device  # type: ignore[method-assign]
    try:
        with CudaKernels():
            yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]
