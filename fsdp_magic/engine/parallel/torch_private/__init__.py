"""ENGINE: the private names of torch that we need, in one place.

Checked on torch 2.13.0. ``reset_iter_state`` is public there; for 2.11 and 2.12, which lack it,
the fallback does what it does, after their source (torch/distributed/fsdp/_fully_shard).
A test in ``tests/engines`` fails when one of them moves.
"""

from fsdp_magic.engine.parallel.torch_private.backward import (
    BACKWARD_FUNCTION,
    _reset_iteration_state,
    at_end_of_backward,
    backward_number,
    call_after_backward,
    count_missing_as_zero,
    forget_iteration,
    is_in_backward,
    reduce_what_came_late,
    run_backward,
)
from fsdp_magic.engine.parallel.torch_private.composable import (
    put_state_reference,
    state_reference,
)
from fsdp_magic.engine.parallel.torch_private.forward import (
    free_after_inference,
    gathered_again_in_backward,
    gathered_around,
)
from fsdp_magic.engine.parallel.torch_private.loaders import shut_down_workers
from fsdp_magic.engine.parallel.torch_private.newest_names import all_gather_single
from fsdp_magic.engine.parallel.torch_private.optimizers import (
    make_state,
    makes_state,
    step_on_own_parts,
)
from fsdp_magic.engine.parallel.torch_private.tensors import (
    address_of,
    align_group_count,
    cast_floating,
    point_at,
    read_scalars_whole,
    shard_like,
    storage_bytes,
    take_whole_in_lists,
    writes_to,
)
from fsdp_magic.engine.parallel.torch_private.units import (
    clear_gradients,
    free,
    gather_outside_inference,
    held_gathered,
    keep_writes,
    name_in_collectives,
    parameter_groups,
    set_divide_factor,
    settle_root,
    sharded_of_unsharded,
    units,
    unsharded_parameters,
)
from fsdp_magic.engine.parallel.torch_private.views import gather_for_written_views

__all__ = [
    "BACKWARD_FUNCTION",
    "_reset_iteration_state",
    "address_of",
    "align_group_count",
    "all_gather_single",
    "at_end_of_backward",
    "backward_number",
    "call_after_backward",
    "cast_floating",
    "clear_gradients",
    "count_missing_as_zero",
    "forget_iteration",
    "free",
    "free_after_inference",
    "gather_for_written_views",
    "gather_outside_inference",
    "gathered_again_in_backward",
    "gathered_around",
    "held_gathered",
    "is_in_backward",
    "keep_writes",
    "make_state",
    "makes_state",
    "name_in_collectives",
    "parameter_groups",
    "point_at",
    "put_state_reference",
    "read_scalars_whole",
    "reduce_what_came_late",
    "run_backward",
    "set_divide_factor",
    "settle_root",
    "shard_like",
    "sharded_of_unsharded",
    "shut_down_workers",
    "state_reference",
    "step_on_own_parts",
    "storage_bytes",
    "take_whole_in_lists",
    "units",
    "unsharded_parameters",
    "writes_to",
]
