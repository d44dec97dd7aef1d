"""ENGINE: a full device: recognised, described with numbers, and emptied.

A failed cell's tensors live in the frames of its exception, in the names that it bound, in what
the extension keeps of the step, and in what the allocator keeps for later.
"""

from __future__ import annotations

import ctypes
import gc
import re
import traceback
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_magic.core.reply import OutOfMemory
from fsdp_magic.core.specs import TrainSpec
from fsdp_magic.core.units import GIB, KIB, MIB, TIB
from fsdp_magic.engine import memory_limit, telemetry
from fsdp_magic.engine.cell_sources import PREFIX
from fsdp_magic.engine.groups import is_broken_transport
from fsdp_magic.engine.interrupts import ReleasedByPeerError
from fsdp_magic.engine.reachable import reachable

_SIGNS = ("can't allocate memory", "out of memory", "std::bad_alloc")
_ONEDNN_SIGNS = ("could not create a primitive", "could not execute a primitive")
"""The whole of what oneDNN says when it gets no memory for its code or workspace."""
_ASKED = re.compile(r"(?:tried|[Uu]nable) to allocate (\d+(?:\.\d*)?) (bytes|B|[KMGT]iB)", re.I)
"""Source: torch's c10/core/impl/alloc_cpu.cpp and CUDACachingAllocator.cpp, numpy's
``_ArrayMemoryError``."""
_UNITS = {"bytes": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_DATA = (
    "batches",
    "chain",
    "collating",
    "data",
    "feeding",
    "loaders",
    "sources",
    "streamed",
    "track",
)
_PHASES = (
    # part of a file's path -> what it does; the deepest frame that is named here says the phase
    ("/torch/optim/", "in the optimizer's step"),
    ("/torch/autograd/__init__", "in the backward"),
    ("/torch/utils/data/", "while data was loaded"),
    ("/fsdp_magic/engine/gradients", "while gradients were measured"),
    ("/fsdp_magic/engine/modeling", "while a model was sharded"),
    *((f"/fsdp_magic/engine/{part}.py", "while data was loaded") for part in _DATA),
    ("/fsdp_magic/engine/variables", "while a value was gathered"),
    ("/fsdp_magic/engine/micro_step", "in the forward"),
)
_LINE_CHARACTERS = 60
_BUILT: tuple[type, ...] = (nn.Module, Optimizer)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that the device is full.

    Source: on CUDA torch raises ``OutOfMemoryError``; on CPU a ``RuntimeError`` whose text names
    its allocator; gloo lets ``std::bad_alloc`` through.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    return str(error) in _ONEDNN_SIGNS or any(sign in str(error) for sign in _SIGNS)


def described(error: BaseException) -> OutOfMemory | None:
    """Return how full the device was and where; None if an exception says something else.

    To be called while the frames of the exception are still there, and with them its tensors.
    """
    if not is_out_of_memory(error) or not telemetry.is_measured():
        return None
    memory, asked = telemetry.memory(), _asked_bytes(str(error))
    return OutOfMemory(
        where=_place(error),
        asked_bytes=asked,
        allocated_bytes=max(memory.allocated_bytes, _least(memory.capacity_bytes, asked)),
        used_bytes=memory.used_bytes,
        capacity_bytes=memory.capacity_bytes,
    )


def _least(capacity: int | None, asked: int | None) -> int:
    """Return what was allocated at least when a request was refused; 0: nobody knows.

    By the time the exception is here, what no name holds is free again. Only under a limit of our
    own is it certain that everything up to it was taken.
    """
    if asked is None or capacity is None or not memory_limit.is_set():
        return 0
    return max(0, capacity - asked)


def advice_for_training(
    spec: TrainSpec, *, micro_batch_size: int | None, accumulate: int, strategy: str, ranks: int
) -> str:
    """Return what to type after a training cell was out of memory.

    Args:
        spec: the options of the cell.
        micro_batch_size: in use; None: the data comes in batches of its own.
        accumulate: micro-batches per step in use.
        strategy: of the models.
        ranks: in the world.
    """
    if micro_batch_size is None:
        smaller = "" if spec.data is None else "smaller batches in the data, "
        return f"try {smaller}{advice_for_models(strategy=strategy, ranks=ranks)}"
    size = next((b for b in range(micro_batch_size // 2, 0, -1) if micro_batch_size % b == 0), 0)
    if size == 0:
        return f"try {advice_for_models(strategy=strategy, ranks=ranks)}"
    accumulation = f" --accumulate {accumulate * micro_batch_size // size}"
    if spec.global_batch_size is not None:  # it sets the accumulation
        accumulation = ""
    return f"try --micro-batch-size {size}{accumulation} (the same step)"


def advice_for_models(*, strategy: str, ranks: int) -> str:
    """Return what makes a model take less of each rank's memory."""
    sharded = "" if strategy == "full_shard" else "%%fsdp_model --strategy full_shard, "
    return f"{sharded}more ranks (%fsdp_init -n {2 * ranks} --restart) or a smaller model"


def advice_for(verb: str, *, strategy: str, ranks: int) -> str:
    """Return what to try after another verb than ``train`` was out of memory."""
    match verb:
        case "evaluate":
            return "try a smaller --micro-batch-size"
        case "model":
            return f"try {advice_for_models(strategy=strategy, ranks=ranks)}"
    return "try smaller pieces, or free what is not needed any more: del NAME"


def forget_graphs(namespace: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Let go of the graph of a failed step, which the names that its cell bound still hold.

    A tensor stays, without what led to it; what else holds one is unbound.
    """
    for name in names:
        value = namespace.get(name)
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                namespace[name] = value.detach()
        elif any(t.grad_fn is not None for t in reachable({"v": value}, torch.Tensor).values()):
            del namespace[name]


@contextmanager
def half_built_is_forgotten(
    namespace: MutableMapping[str, Any], names: Iterable[str]
) -> Iterator[None]:
    """Unbind models, and their optimizers, whose sharding inside ran out of memory on any rank.

    Args:
        namespace: the person's variables.
        names: what their cell has bound.
    """
    try:
        yield
    except BaseException as error:
        released = isinstance(error, ReleasedByPeerError) or is_broken_transport(error)
        if released or is_out_of_memory(error):
            for name in names:
                built = {"it": namespace.get(name)}
                if any(reachable(built, kind) for kind in _BUILT):
                    del namespace[name]
        raise


def give_back(device: torch.device) -> None:
    """Give what the allocator keeps for later back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def _asked_bytes(message: str) -> int | None:
    match = _ASKED.search(message)
    return None if match is None else int(float(match[1]) * _UNITS[match[2].lower()])


def _place(error: BaseException) -> str:
    """Return the phase and the line of the cell, as words to put into a sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    if "DataLoader worker" in str(error):
        phase = "in a DataLoader worker"
    else:
        named = (words for f in reversed(frames) for part, words in _PHASES if part in f.filename)
        phase = next(named, "")
    lines = [frame for frame in frames if frame.filename.startswith(PREFIX)]
    if not lines:
        return phase
    line = " ".join((lines[-1].line or "").split())
    if len(line) > _LINE_CHARACTERS:
        line = f"{line[:_LINE_CHARACTERS]}…"
    of = "of line" if phase.startswith("in ") else "in line"
    return f"{phase} {of} {lines[-1].lineno} ({line})".strip()
