"""The model of CUDA's caching allocator beside the real one, on one NVIDIA GPU.

Random sequences on three streams, of sizes as training has them, are taken and given back on the
card and in ``core/planning/allocator.py``, in a fresh process for each mode. Bytes allocated in the
end and the most reserved must agree; the driver's choice of addresses may break ties between free
blocks of one size otherwise, hence the bound.

    python benchmarks/allocator_replay.py

Without a GPU nothing is compared, and it says so.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

from side_by_side import machine, say

from fsdp_magic.core.planning.allocator import CachingAllocator
from fsdp_magic.core.units import KIB, MIB

SEEDS = range(20)
MOVES, SLOTS, STREAMS = 2000, 60, 3
SIZES = (512, 40 * KIB, MIB, 3 * MIB, 10 * MIB, 24 * MIB, 100 * MIB)
BOUND = 0.01
MODES = {"expandable": "expandable_segments:True", "plain": "expandable_segments:False"}


def moves(seed: int) -> list[tuple[int, int, int]]:
    """Return slots with a stream and a size; a slot that is taken is given back instead."""
    draw = random.Random(seed)
    return [
        (
            draw.randrange(SLOTS),
            draw.randrange(STREAMS),
            max(1, int(draw.choice(SIZES) * draw.uniform(0.5, 1.5))),
        )
        for _ in range(MOVES)
    ]


def modelled(seed: int, *, expandable: bool) -> tuple[int, int]:
    """Return the bytes allocated in the end, and the most reserved, by the model."""
    allocator = CachingAllocator(1 << 40, expandable=expandable)
    held: dict[int, Any] = {}
    for slot, stream, size in moves(seed):
        if slot in held:
            allocator.free(held.pop(slot))
        else:
            held[slot] = allocator.allocate(size, stream)
    return allocator.allocated_bytes, allocator.peak_reserved_bytes


def measured(seed: int) -> tuple[int, int]:
    """Return the same of the card."""
    import torch

    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    held: dict[int, Any] = {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for slot, stream, size in moves(seed):
        if slot in held:
            del held[slot]
        else:
            with torch.cuda.stream(streams[stream]):
                held[slot] = torch.empty(size, dtype=torch.uint8, device="cuda")
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()


def compared(mode: str) -> list[dict[str, int]]:
    """Compare all seeds in this process, which has the mode set."""
    rows = []
    for seed in SEEDS:
        allocated, reserved = measured(seed)
        ours = modelled(seed, expandable=mode == "expandable")
        rows.append(
            {
                "seed": seed,
                "allocated": allocated,
                "allocated_modelled": ours[0],
                "reserved": reserved,
                "reserved_modelled": ours[1],
            }
        )
    return rows


def main() -> int:
    """Compare both modes, each in a process of its own."""
    import torch

    if len(sys.argv) > 1:
        print(json.dumps(compared(sys.argv[1])))
        return 0
    if not torch.cuda.is_available():
        say("no GPU here: nothing was compared")
        return 0
    result: dict[str, Any] = {"benchmark": "allocator_replay", "machine": machine(), "modes": {}}
    worst = 0.0
    for mode, setting in MODES.items():
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": setting}
        command = [sys.executable, __file__, mode]
        answer = subprocess.run(command, env=environment, check=True, capture_output=True)
        rows = json.loads(answer.stdout)
        for key in ("allocated", "reserved"):
            worst = max(worst, *(abs(r[f"{key}_modelled"] / r[key] - 1) for r in rows))
        result["modes"][mode] = rows
    result |= {"card": torch.cuda.get_device_name(), "worst_error": worst, "bound": BOUND}
    result["passes"] = worst <= BOUND
    print(json.dumps(result))
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
