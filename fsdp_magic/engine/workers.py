"""ENGINE: a person's DataLoader rebuilt for this rank, and its workers' lives.

What a worker inherits it keeps open: a dead engine's sockets too, so that peers would wait for
it. So every worker asks the kernel to be killed with its engine, and those of a run end with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing.queues
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader

from fsdp_magic.engine.parallel.torch_private import shut_down_workers

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""
_QUEUE: Any = multiprocessing.queues.Queue  # whose private names no stubs know


def rebuilt(loader: DataLoader[Any], *, seed: int, **changed: Any) -> DataLoader[Any]:
    """Return a loader over the same data with the same workers.

    Args:
        loader: the person's, which is left alone.
        seed: of the workers' random states.
        changed: what differs: ``batch_sampler``, ``batch_size``, ``sampler``, ``collate_fn``.
    """
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        # torch warns where there is nothing to copy to
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
        "timeout": loader.timeout,
        "generator": torch.Generator().manual_seed(seed),
        "in_order": loader.in_order,
    }
    if loader.num_workers:
        # a class of a cell cannot be pickled: workers inherit it
        context = loader.multiprocessing_context or torch.multiprocessing.get_context("fork")
        options |= {
            "multiprocessing_context": context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "worker_init_fn": WorkerStart(
                own=loader.worker_init_fn,
                parent=None if context.get_start_method() == "forkserver" else os.getpid(),
            ),
        }
    return DataLoader(loader.dataset, **{**options, **changed})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """What a worker does first.

    Attributes:
        own: the person's ``worker_init_fn``.
        parent: the engine; None if a fork server stands between.
    """

    own: Callable[[int], None] | None
    parent: int | None

    def __call__(self, worker: int) -> None:
        """Die with the engine; then do what the person wants."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.parent is not None and os.getppid() != self.parent:
            os._exit(1)  # it died before we asked
        if self.own is not None:
            self.own(worker)


@dataclass(slots=True, kw_only=True)
class LoaderIterators:
    """The iterators over one rebuilt loader; at most one lives.

    Attributes:
        loader: kept through a run, so that its persistent workers are too.
    """

    loader: DataLoader[Any]
    _latest: Any = field(default=None, repr=False)

    def begin(self, seed: int) -> Any:
        """Return a new iterator; workers start here, or begin anew if they are persistent."""
        try:
            if not self.loader.persistent_workers:
                self.close()
            self.loader.generator.manual_seed(seed)
            self._latest = iter(self.loader)
        except BaseException as error:
            _end_threads_of_queues(error)
            raise
        return self._latest

    def close(self) -> None:
        """End the workers."""
        if self._latest is not None and self.loader.num_workers:
            shut_down_workers(self._latest)
        self._latest = None


def _end_threads_of_queues(error: BaseException) -> None:
    """Let a queue that was being started when an interrupt came end its thread when it is closed.

    A queue notes how to end it only once the thread runs, which on a busy machine takes a while;
    interrupted in between it would keep the thread and its pipe for good. Source:
    ``Queue._start_thread`` in Python's multiprocessing/queues.py.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is _QUEUE._start_thread.__code__:
            queue = frame.f_locals["self"]
            if queue._thread is not None and queue._close is None:
                held = [queue._buffer, queue._notempty]
                queue._close = Finalize(queue, _QUEUE._finalize_close, held, exitpriority=10)
