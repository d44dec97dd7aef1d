"""What a plan costs: seconds and host memory, beside really building the model.

``python benchmarks/plan_cost.py`` plans GPT-2 XL under six strategies on two ranks and on 1,024,
and a Llama of 70 billion parameters on 64, each in a fresh process without the cache, and builds
GPT-2 XL for real, with its weights and nothing more. Seconds are those of the whole process with
its imports; memory is the highest resident set of the largest process.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "plan_cost.json"
BOUNDS = {"gpt2_xl": (10.0, 500), "llama_70b": (60.0, 2048)}
"""Seconds and MiB."""

GPT2_XL = """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False))
"""
LLAMA_70B = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
))
"""
OF_ONE_TRACE = (
    "ddp", "zero1", "shard_grad_op", "full_shard", "full_shard+cpu_offload",
    "shard_grad_op+cpu_offload",
)  # fmt: skip
"""Six strategies that one trace gives."""
OF_TWO_TRACES = (*OF_ONE_TRACE[:5], "full_shard+activation_checkpointing")
"""The six that ``%%fsdp_plan`` takes by itself: checkpointing is traced by itself."""
MEASURED = """
import json, resource, sys, time
began = time.monotonic()
{code}
seconds = time.monotonic() - began
highest = max(resource.getrusage(who).ru_maxrss for who in
              (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({{"seconds": round(seconds, 2), "highest_mib": round(highest / 1024)}}))
"""
PLAN = """
import fsdp_magic
plan = fsdp_magic.plan({cell!r}, gpu_memory={memory!r}, world_size={ranks}, seq_len={length},
                       strategies={strategies!r}, no_cache=True, show=False)
sizes = plan.max_micro_batch_size
print(sizes, file=sys.stderr)
"""


def measured(code: str) -> dict[str, Any]:
    """Run code in a process of its own, and return what it took."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(code=code)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def planned(cell: str, *, memory: str, ranks: int, length: int, strategies: Any) -> dict[str, Any]:
    """Return what a plan took."""
    code = PLAN.format(
        cell=cell, memory=memory, ranks=ranks, length=length, strategies=list(strategies)
    )
    return {"ranks": ranks, "strategies": len(strategies), **measured(code)}


def main() -> None:
    """Measure, print and record."""
    found = {
        "gpt2_xl": planned(GPT2_XL, memory="24GiB", ranks=2, length=128, strategies=OF_ONE_TRACE),
        "gpt2_xl_1024_ranks": planned(
            GPT2_XL, memory="24GiB", ranks=1024, length=128, strategies=OF_ONE_TRACE
        ),
        "gpt2_xl_two_traces": planned(
            GPT2_XL, memory="24GiB", ranks=2, length=128, strategies=OF_TWO_TRACES
        ),
        "llama_70b": planned(
            LLAMA_70B,
            memory="80GiB",
            ranks=64,
            length=4096,
            strategies=("full_shard+bf16", "full_shard+bf16+activation_checkpointing"),
        ),
        "gpt2_xl_built": measured(GPT2_XL),
    }
    passed = {
        name: found[name]["seconds"] <= seconds and found[name]["highest_mib"] <= mib
        for name, (seconds, mib) in BOUNDS.items()
    }
    result = {"bounds": BOUNDS, "passed": passed, **found, "python": platform.python_version()}
    print(json.dumps(result, indent=2))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
