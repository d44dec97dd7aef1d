"""ENGINE: units whose forward returns a view, and what is written into it afterwards.

FSDP2 gathers a unit for its backward in a hook on what its forward returned. Of a view (what
``Conv1D`` of transformers returns) an operation in place, such as ``h += x``, makes autograd forget
that hook: the unit is not gathered, and backward fails. torch 2.13 warns of it at every view. The
tensor that the view was made of keeps its hooks, whatever is written into it, so the hook is put
there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

_GIVEN = "RegisterPostBackwardFunctionBackward"
"""The function that FSDP2 passes through what it gives to a unit."""


def gather_for_written_views(unit: Any) -> None:
    """Let a unit be gathered for its backward also where a view it returned is written into."""
    state = unit._get_fsdp_state()
    watched = functools.partial(_watch_outputs, state, state._register_pre_backward_hook)
    state._register_pre_backward_hook = watched


def _watch_outputs(state: Any, torchs_own: Callable[[Any], Any], output: Any) -> Any:
    """Put the hooks that gather a unit on what its forward returned."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return torchs_own(output)
    tensors = _with_gradients(output)
    hooked: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        lasting = _with_lasting_hooks(tensor)
        if lasting is None:  # torch's warning is right
            return torchs_own(output)
        hooked[id(lasting)] = lasting
    for tensor in hooked.values():
        tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
    return output


def _with_lasting_hooks(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return where a hook stays that gathers the unit which returned a tensor; None: nowhere.

    A view of what the unit was given is returned itself: its gradient needs no parameters.
    """
    base, node = tensor._base, tensor.grad_fn
    if base is None:
        return tensor
    while node is not None and node is not base.grad_fn:
        if node.name() == _GIVEN:
            return tensor
        if isinstance(node, BackwardCFunction) or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return base if node is not None else None


def _with_gradients(output: Any) -> list[torch.Tensor]:
    """Return the tensors in an output that gradients may arrive at."""
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors
    except ImportError:  # before 2.13, where containers of other kinds were not looked into
        leaves = tree_leaves(output)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return list(collect_grad_tensors(output))
