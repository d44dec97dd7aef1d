"""The tuned batch size on a card: it trains, the next one does not, and what was planned for it."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

from fsdp_magic.errors import OutOfMemoryOnRankError
from fsdp_magic.notebook.sessions import init as start

Figures = dict[str, Any]
SETTING = "expandable_segments:True"
"""What torch recommends against fragmentation."""
_SHARE = 0.06
"""Of the card: a large one would take long to fill."""
_MARGIN = 0.05

_MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))
                        for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        return torch.full((64, 256), index / 4096)

data = Samples()
"""
_CELL = "loss = (model(batch) - batch).pow(2).mean()"


def tuned(device: str, setting: str) -> Figures:
    """Tune on one rank, train 20 steps of the size found, and try the next one.

    Args:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        setting: of torch's caching allocator; empty: none.
    """
    on_gpu = device == "cuda"
    options: Figures = {} if on_gpu else {"memory_limit": "96MiB"}
    environment = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
    with (
        patch.dict(os.environ, environment),
        start(n=1, device=device, show=False, restart=True, **options) as session,
    ):
        if on_gpu:
            session.run(
                f"import torch; torch.cuda.set_per_process_memory_fraction({_SHARE}, device)\n"
                "from fsdp_magic.engine import telemetry\n"
                f"telemetry._METER[0]._capacity = int(telemetry._METER[0]._capacity * {_SHARE})",
                show=False,
            )
        session.model(_MODEL.replace("WIDTH", "4096" if on_gpu else "512"), show=False)
        found = session.tune(_CELL, data="data", margin=_MARGIN, show=False)
        size = found.micro_batch_size
        run = session.train(_CELL, data="data", steps=20, show=False)
        assert run.micro_batch_size == size, (run.micro_batch_size, size)
        capacity = session.status(show=False)[0].capacity_bytes
        assert capacity is not None
        # on a CPU a run looks ten times a second, and may not see the height of a short step
        refused = _next_is_refused(session, size + 1, capacity) if on_gpu else "not looked at"
        assert refused or found.table[0].ended_by != "memory", found.last_frame[1]
    return {
        "setting": setting or "none",
        "micro_batch_size": size,
        "ended_by": found.table[0].reason,
        "probes": [
            (p.micro_batch_size, p.fits, max(p.peak_bytes, default=None)) for p in found.probes
        ],
        "planned": found.planned[-1:],
        "peak_bytes": run.peak_bytes,
        "capacity_bytes": capacity,
        "next_size": refused,
    }


def _next_is_refused(session: Any, size: int, capacity: int) -> str:
    """Return how a size does not fit; nothing: it does."""
    try:
        run = session.train(_CELL, data="data", steps=3, micro_batch_size=size, show=False)
    except OutOfMemoryOnRankError as error:
        return str(error).splitlines()[0]
    over = [peak for peak in run.peak_bytes if peak > (1 - _MARGIN) * capacity]
    return f"its peak is {over[0]:,} bytes, inside the margin" if over else ""
