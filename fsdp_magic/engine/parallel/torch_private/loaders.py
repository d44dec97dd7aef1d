"""ENGINE: private names of torch's DataLoader."""

from __future__ import annotations

import time
from typing import Any

import torch

_WORKER_GRACE_SECONDS = 0.5


def shut_down_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator now, not when it is collected.

    A failed cell's frames may keep it for a while; the workers would live on as long. torch's own
    way waits 5 s for each that is busy in the data set; these get half a second together.

    Source: ``_MultiProcessingDataLoaderIter._shutdown_workers`` (torch/utils/data/dataloader.py).
    """
    if iterator._shutdown:
        return
    # from here on a worker that dies is no error
    torch._C._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    iterator._workers_done_event.set()
    for number, alive in enumerate(iterator._workers_status):
        if alive:
            iterator._mark_worker_as_unavailable(number, shutdown=True)
    deadline = time.monotonic() + _WORKER_GRACE_SECONDS
    for worker in iterator._workers:
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
    iterator._shutdown_workers()
