"""ENGINE: sharded tensors as numbers and bytes, and the count of process groups."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.utils import _apply_to_tensors

_ON_LISTS = re.compile("_foreach_")


def read_scalars_whole() -> None:
    """Let ``.item()``, ``float()`` and ``bool()`` of a sharded tensor give the whole value.

    torch gives each rank its own part of a sum that is not yet added up. Reading becomes
    collective: every rank must do it.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _read_whole


def _read_whole(
    op_call: Any,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    (tensor,) = args
    assert isinstance(tensor, DTensor)
    whole: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return op_call(whole, **kwargs)


def take_whole_in_lists() -> None:
    """Let operators on lists, as clipping uses, take shards and tensors that ranks hold whole.

    Only these: elsewhere a whole tensor beside a shard is a mistake, which torch tells.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for name in filter(_ON_LISTS.match, dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for operator in (getattr(packet, overload) for overload in packet.overloads()):
            handlers.setdefault(operator, _with_whole)
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    if not isinstance(handlers[unscale], functools.partial):
        handlers[unscale] = functools.partial(_shards_first, handlers[unscale])


def _with_whole(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Take whole tensors as what all ranks have."""
    with _without_handler(op_call, _with_whole):
        return op_call(*args, **kwargs)


@contextmanager
def _without_handler(op_call: Any, handler: Any) -> Iterator[None]:
    dispatcher = DTensor._op_dispatcher
    dispatcher._custom_op_handlers.pop(op_call)
    before, dispatcher._allow_implicit_replication = dispatcher._allow_implicit_replication, True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before
        dispatcher._custom_op_handlers[op_call] = handler


def _shards_first(
    handler: Any, op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]
) -> Any:
    """Unscale gradients with shards first: torch takes where they are from the first."""
    gradients, *rest = args
    ordered = sorted(gradients, key=lambda gradient: not isinstance(gradient, DTensor))
    dispatcher = DTensor._op_dispatcher
    before, dispatcher._allow_implicit_replication = dispatcher._allow_implicit_replication, True
    try:
        return handler(op_call, (ordered, *rest), kwargs)
    finally:
        dispatcher._allow_implicit_replication = before


def align_group_count() -> None:
    """Let all ranks count process groups alike, so that the next ``new_group`` meets.

    torch names a group by how many this rank has made, and a failure may have kept some ranks
    from making one.

    Collective: every rank must call this.
    """
    count = torch.tensor([distributed_c10d._world.group_count])
    distributed_c10d.all_reduce(count, op=distributed_c10d.ReduceOp.MAX)
    distributed_c10d._world.group_count = int(count)


def shard_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a rank's part, which is not copied, as a tensor that is sharded as another.

    ``DTensor.from_local`` takes ten times as long, and moves the part to the mesh's device, while
    offloaded shards are on the host.

    Source: ``_from_local_no_grad`` (torch/distributed/fsdp/_fully_shard/_fsdp_common.py).
    """
    spec = like._spec
    if local.dtype != like.dtype:
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
        spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    made: Any = DTensor
    sharded: DTensor = made(local, spec, requires_grad=False)
    return sharded


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor holds on this rank; of a DTensor, its shard's."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel() * local.element_size())


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with the floating tensors in it, also within containers, in a dtype.

    Source: FSDP2 casts inputs and outputs so (torch/distributed/fsdp/_fully_shard/_fsdp_state.py).
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, value)


def point_at(shard: torch.Tensor, rows: torch.Tensor) -> None:
    """Have a sharded tensor be of other rows, of the same shape.

    Source: ``reset_sharded_param`` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), which
    does it to parameters that were loaded.
    """
    assert isinstance(shard, DTensor)
    if shard._local_tensor.data_ptr() != rows.data_ptr():
        shard._local_tensor = rows


def address_of(shard: torch.Tensor) -> int:
    """Return where the rows of a sharded tensor are that this rank has."""
    assert isinstance(shard, DTensor)
    return shard._local_tensor.data_ptr()


def writes_to(shard: torch.Tensor) -> int:
    """Return how often a sharded tensor was written, itself or what ``to_local()`` gives."""
    assert isinstance(shard, DTensor)
    return shard._version + shard._local_tensor._version
