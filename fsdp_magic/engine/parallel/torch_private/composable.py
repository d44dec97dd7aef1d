"""ENGINE: where torch keeps the state that ``fully_shard`` gives to a module.

Source: ``_module_state_mapping`` of torch/distributed/_composable_state.py: a module may be put
in only once, and nothing takes it out again.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._composable_state import _module_state_mapping


def state_reference(module: nn.Module) -> Any:
    """Return torch's weak reference to a module's state; None: it has none."""
    return _module_state_mapping.get(module)


def put_state_reference(module: nn.Module, reference: Any) -> None:
    """Let a module have a state, or none (None), whatever it has now."""
    if reference is None:
        _module_state_mapping.pop(module, None)
    else:
        _module_state_mapping[module] = reference
