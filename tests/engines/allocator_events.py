"""How much memory engines have allocated, from the events of torch's own allocator.

The profiler records every allocation and release on the thread that runs cells, and on gloo's,
which inherit its state. What gloo's threads let go after that is in no event, but in the total
that goes with each event once c10 is told to count on every thread. So a peak is exact to the
byte, and blind to nothing but what is taken and given back between two events.

Source: ``ProfiledCPUMemoryReporter`` in c10/core/CPUAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_magic.notebook.session import Session

_BEGIN = """
import ctypes, gc
import torch
from torch._C._profiler import _EventType
ctypes.c_bool.in_dll(
    ctypes.CDLL(torch.__path__[0] + "/lib/libc10.so"), "FLAGS_caffe2_report_cpu_memory_usage"
).value = True
gc.collect()
allocator_watch = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
allocator_watch.__enter__()
"""
_TRAINING = """
with torch.profiler.record_function("training begins"):
    pass
"""
_END = """
def allocator_peaks():
    events, ends = [], []
    def walk(nodes):
        for node in nodes:
            if node.tag == _EventType.Allocation:
                fields = node.extra_fields
                events.append((node.start_time_ns, fields.alloc_size, fields.total_allocated))
            elif node.name == "training begins" or node.name.startswith("Optimizer.step"):
                ends.append(node.end_time_ns)
            walk(node.children)
    walk(allocator_watch.kineto_results.experimental_event_tree())
    events.sort()
    before = events[0][2] - events[0][1]
    steps = zip(ends, [*ends[1:], events[-1][0] + 1])
    return [
        max((total for time, _, total in events if begin <= time < end), default=before) - before
        for begin, end in steps
    ]

allocator_watch.__exit__(None, None, None)
peaks = allocator_peaks()
for name in ("model", "optimizer", "loss", *LEFT):
    globals().pop(name, None)
del allocator_watch, allocator_peaks
gc.collect()
"""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of allocated bytes: of each rank, by step, and of what followed the last step.

    A step ends where an optimizer has stepped. Steps differ by what other threads are late with:
    gloo's let go of a copy some time after it was waited for, and a bucket of gradients that is
    reduced early makes room for the next.
    """

    of_ranks: list[list[int]]

    @property
    def highest(self) -> int:
        """The highest of any rank."""
        return max(max(steps) for steps in self.of_ranks)

    @property
    def lowest(self) -> int:
        """The lowest of any rank in any step but the first, which makes what later ones have."""
        return min(min(steps[1:-1]) for steps in self.of_ranks)

    @property
    def by_step(self) -> list[int]:
        """The highest of any rank, by step."""
        return [max(steps) for steps in zip(*self.of_ranks, strict=True)]


def measured(
    session: Session,
    model: str,
    cell: str,
    *,
    steps: int,
    left: Sequence[str] = (),
    training: dict[str, Any] | None = None,
    **options: Any,
) -> Peaks:
    """Train a model, and return what was allocated at most beyond what there was before it.

    Args:
        session: with nothing allocated for long.
        model: the cell that binds ``model`` and ``optimizer``.
        cell: the training cell.
        steps: how many.
        left: names that the cells leave with tensors in them, beside those known.
        training: options of training.
        options: of the model.
    """
    session.run(_BEGIN, show=False)
    session.model(model, "model", show=False, **options)
    session.run(_TRAINING, show=False)
    session.train(cell, steps=steps, show=False, **(training or {}))
    session.run(f"LEFT = {tuple(left)!r}\n{_END}", show=False)
    return Peaks(session.pull("peaks", rank="all"))


ALLOCATE = """
import threading
held = torch.empty(1 << 20, dtype=torch.uint8)
gone = torch.empty(1 << 21, dtype=torch.uint8)
del gone
gathered = torch.empty(world_size << 20, dtype=torch.uint8)
torch.distributed.all_gather_into_tensor(gathered, held)
part = torch.empty(1 << 20, dtype=torch.uint8)
torch.distributed.reduce_scatter_tensor(part, gathered)
"""


def of_known_pattern(session: Session) -> list[int]:
    """Return the peak of each rank of allocations that can be added up by hand.

    1 MiB is held and 2 MiB go; then 1 MiB of each rank is gathered, with gloo's copy of that; then
    1 MiB is reduced into, with gloo's copy of what is reduced: 2 * ranks + 2 MiB at most.
    """
    session.run(_BEGIN + _TRAINING + ALLOCATE, show=False)
    session.run(f"LEFT = ('held', 'gathered', 'part')\n{_END}", show=False)
    return [max(steps) for steps in session.pull("peaks", rank="all")]
