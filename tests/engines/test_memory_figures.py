"""Memory of a CPU rank: each figure is what it is called, and agrees with who else counts (F29)."""

from __future__ import annotations

from fsdp_magic.core.units import MIB
from fsdp_magic.notebook.session import Session

ALLOCATE = """
def resident_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Rss:"))

import gc, torch
gc.collect()
resident_before = resident_bytes()
known = torch.ones(64 * 1024 * 1024 // 4)
resident = resident_bytes() - resident_before
"""


def test_allocated_reserved_and_used_rise_by_what_a_rank_allocates(session: Session) -> None:
    before = session.status(show=False)
    session.run(ALLOCATE, ranks="0", show=False)
    after = session.status(show=False)
    for name in ("allocated_bytes", "reserved_bytes", "used_bytes"):
        risen = [getattr(b, name) - getattr(a, name) for a, b in zip(before, after, strict=True)]
        assert abs(risen[0] - 64 * MIB) <= MIB, name
        assert abs(risen[1]) <= MIB, name
    (counted,) = session.run("resident", ranks="0", show=False)
    assert abs(int(counted.result or 0) - 64 * MIB) <= 2 * MIB  # as the operating system counts
    session.run("del known", ranks="0", show=False)
    freed = session.status(show=False)[0]
    assert abs(freed.allocated_bytes - before[0].allocated_bytes) <= MIB
    assert freed.memory.peak_allocated_bytes >= before[0].allocated_bytes + 63 * MIB


def test_parts_are_the_tensors_they_are_called_after_and_add_up_to_used(session: Session) -> None:
    session.model(
        "import torch\nmodel = torch.nn.Linear(1024, 1024, bias=False)\n"
        "optimizer = torch.optim.AdamW(model.parameters())",
        show=False,
    )
    cell = "loss = model(torch.ones(1, 1024)).mean()"
    session.train(cell, show=False)  # else the highest moment may be before the optimizer's state
    run = session.train(cell, steps=2, show=False)
    for rank, state in zip(run.ranks, session.status(show=False), strict=True):
        for memory in (rank.memory, rank.peak_memory, state.memory):
            assert memory is not None
            assert memory.parameter_bytes == 2 * MIB  # 4 MiB on two ranks
            assert 0 <= memory.optimizer_bytes - 4 * MIB < 1024
            held = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
            held += memory.activation_bytes + memory.cache_bytes + memory.other_bytes
            assert held == memory.used_bytes
    assert session.status(show=False)[0].device_name == run.ranks[0].device_name
