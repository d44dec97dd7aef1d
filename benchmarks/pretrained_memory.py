"""Host memory while engines load one safetensors checkpoint with ``from_pretrained``.

``python benchmarks/pretrained_memory.py [--engines 4]`` writes a GPT-2-shaped checkpoint of random
weights, loads it in a ``%%fsdp_model`` cell on every engine, and samples the memory of the engines
meanwhile: the proportional set size (PSS), in which a page that several processes map counts once.
The result is the highest sum above that of the idle engines, as a multiple of the checkpoint.

The bound is for weights that stay as they are in the file (GPT-2 medium's shape). Two more cases
are recorded: a smaller model, whose embedding, one unit with the root, is a third of it; and
weights that are converted as they are loaded, which every engine does for itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import fsdp_magic

RESULTS = Path(__file__).parent / "results" / "pretrained_memory.json"
BOUND = 1.3

WRITE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
if rank == 0:
    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=WIDTH // 64, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(DIRECTORY, max_shard_size=SHARD)
    del config
"""
LOAD = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(DIRECTORYOPTIONS)
"""


def proportional_bytes(pids: list[int]) -> int:
    """Return the memory of processes in which shared pages count once."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total * 1024


class Sampler:
    """Samples the memory of processes until it is stopped."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self.highest = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            self.highest = max(self.highest, proportional_bytes(self._pids))


def measured(
    engines: int, layers: int, width: int, *, options: str = "", shard: str = "50GB"
) -> dict[str, Any]:
    """Return what loading took on so many engines."""
    with tempfile.TemporaryDirectory() as directory:
        with fsdp_magic.init(n=1, device="cpu") as session:
            code = (
                WRITE.replace("LAYERS", str(layers))
                .replace("WIDTH", str(width))
                .replace("DIRECTORY", repr(directory))
            )
            session.run(code.replace("SHARD", repr(shard)), show=False)
        files = list(Path(directory).glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        load = LOAD.replace("DIRECTORY", repr(directory)).replace("OPTIONS", options)
        with fsdp_magic.init(n=engines, device="cpu") as session:
            session.run("import torch; from transformers import GPT2LMHeadModel", show=False)
            pids = [status.pid for status in session.status(show=False)]
            idle = proportional_bytes(pids)
            began = time.monotonic()
            with Sampler(pids) as sampler:
                session.model(load, show=False)
            seconds = time.monotonic() - began
            after = proportional_bytes(pids)
    return {
        "engines": engines,
        "layers": layers,
        "width": width,
        "options": options.strip(", "),
        "files": len(files),
        "checkpoint_bytes": size,
        "idle_bytes": idle,
        "highest_bytes": sampler.highest,
        "above_idle_checkpoints": round((sampler.highest - idle) / size, 3),
        "after_checkpoints": round((after - idle) / size, 3),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    engines = parser.parse_args().engines
    bounded = measured(engines, 24, 1024)
    others = [
        measured(engines, 12, 768),
        measured(engines, 12, 768, options=", dtype=torch.bfloat16", shard="150MB"),
    ]
    result = {
        "bound": BOUND,
        "passed": bounded["above_idle_checkpoints"] <= BOUND,
        "bounded": bounded,
        "others": others,
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
