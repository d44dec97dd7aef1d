r"""The largest batches of a published study, beside what the planner says of the same programs.

The study: Accelerate Large Model Training using PyTorch Fully Sharded Data Parallel (2022-04-29),
https://huggingface.co/blog/pytorch-fsdp: GPT-2 Large and XL on two 24 GB Titan RTX. Its programs
are of their time, so the model and the ways of spreading it are written down as they were then
(``published/``); tracing, ledger and allocator are the planner's own. Nothing is fitted: every
term has a value and a source, printed below the table.

    python benchmarks/published_table.py > benchmarks/results/published_table.json \
        2> benchmarks/results/published_table.txt
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from published.flat_parameters import FlatParameterOverlay
from published.gpt2 import LARGE, VOCABULARY, XL, LanguageModel, Outputs, Size
from published.loops import one_parameter_at_a_time
from published.replicas import BUCKET, FIRST_BUCKET, ReplicaOverlay
from side_by_side import machine, say
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_magic.core.planning.allocator import largest_that_fits, reserved_peak
from fsdp_magic.core.planning.device import COMMUNICATION_BYTES
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.overlay import Setting, replay
from fsdp_magic.core.planning.step_trace import StepTrace
from fsdp_magic.core.units import GIB
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.tracing import trace_step

SEQUENCE = 128
CAPACITY_GIB, RESERVED_GIB, FREE_GIB = 23.65, 22.76, 20.31 / 1024
USABLE = round((RESERVED_GIB + FREE_GIB) * GIB)
MOST_TRIED = 64
STUDY = "https://huggingface.co/blog/pytorch-fsdp"
TERMS = (
    ("sequence length", f"{SEQUENCE} tokens", f"{STUDY}: --block_size, cut off after 12 there"),
    (
        "usable by torch's allocator",
        f"{USABLE / GIB:.2f} GiB of {CAPACITY_GIB}",
        f"{STUDY}: its own error message, {RESERVED_GIB} GiB reserved and 20.31 MiB free",
    ),
    (
        "NCCL, in the column of that name",
        f"{COMMUNICATION_BYTES >> 20} MiB on two GPUs",
        "the planner's own default, core/planning/device.py; the study prints the same message for "
        "one GPU and for two, so whether it has NCCL in it is open",
    ),
    ("parameters, gradients", "4 bytes an element each", "float32, no mixed precision under FSDP"),
    (
        "AdamW",
        "8 bytes an element, and 4 an element of one parameter at a time",
        "transformers.AdamW.step of 2022: exp_avg, exp_avg_sq, and exp_avg_sq.sqrt()",
    ),
    (
        "gradients between steps",
        "kept",
        "torch.optim.Optimizer.zero_grad before 2.0: set_to_none is False",
    ),
    (
        "outputs",
        "logits, keys and values until the next forward has returned",
        "run_clm_no_trainer.py of the study: outputs = model(**batch)",
    ),
    (
        "buckets of DDP",
        f"4 bytes an element, {FIRST_BUCKET >> 20} MiB then {BUCKET >> 20} MiB",
        "torch/csrc/distributed/c10d/reducer.cpp; gradients are no views of them",
    ),
    (
        "DDP + FP16",
        "autocast, its copies of weights, and outputs in float32 again",
        "accelerate 0.7, prepare_model: autocast, convert_outputs_to_fp32",
    ),
    (
        "units of FSDP",
        "by min_num_params, tied weights twice",
        "torch/distributed/fsdp/wrap.py of 1.12, _recursive_wrap",
    ),
    (
        "a unit's gradient",
        "joined, then padded by a copy, then its shard",
        "fully_sharded_data_parallel.py of 1.12, _post_backward_hook",
    ),
    (
        "segments and blocks",
        "as core/planning/allocator.py says, not expandable",
        "c10/cuda/CUDACachingAllocator.cpp; expandable segments are of 2023",
    ),
    ("left out", "0", "cuBLAS workspaces, about 8 MiB; memory that waits for another stream"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the study's tables.

    Attributes:
        model: ``Large`` or ``XL``.
        method: as the study calls it.
        ranks: GPUs.
        published: its largest batch on each; 0: out of memory with one.
        least_elements: ``min_num_params``; None: DDP.
        sharding: of FSDP.
        offload: whether parameters are in host memory.
        is_half: whether under autocast.
    """

    model: str
    method: str
    ranks: int = 2
    published: int
    least_elements: int | None = None
    sharding: str = "full_shard"
    offload: bool = False
    is_half: bool = False


ROWS = (
    Row(model="Large", method="DDP", published=7),
    Row(model="Large", method="DDP + FP16", published=7, is_half=True),
    Row(
        model="Large",
        method="FSDP, SHARD_GRAD_OP",
        published=11,
        least_elements=2000,
        sharding="shard_grad_op",
    ),
    Row(model="Large", method="FSDP, 1M", published=15, least_elements=1_000_000),
    Row(model="Large", method="FSDP, 2k", published=15, least_elements=2000),
    Row(
        model="Large",
        method="FSDP, 1M, offload",
        published=20,
        least_elements=1_000_000,
        offload=True,
    ),
    Row(model="Large", method="FSDP, 2k, offload", published=22, least_elements=2000, offload=True),
    Row(model="XL", method="DDP", ranks=1, published=0),
    Row(model="XL", method="DDP", published=0),
    Row(model="XL", method="DDP + FP16", ranks=1, published=0, is_half=True),
    Row(model="XL", method="FSDP, 2k", published=5, least_elements=2000),
    Row(
        model="XL",
        method="FSDP, 2k, offload",
        ranks=1,
        published=10,
        least_elements=2000,
        offload=True,
    ),
    Row(model="XL", method="FSDP, 2k, offload", published=14, least_elements=2000, offload=True),
)


def cell(model: LanguageModel, *, is_half: bool) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Return the study's loop body, which keeps its outputs in a variable."""
    kept: dict[str, Outputs] = {}

    def loss_of(batch: dict[str, Any]) -> torch.Tensor:
        if is_half:
            with torch.autocast("cuda", dtype=torch.float16):
                halves = model(**batch)
            kept["outputs"] = Outputs(
                halves.loss,
                halves.logits.float(),
                tuple((k.float(), v.float()) for k, v in halves.keys_and_values),
            )
        else:
            kept["outputs"] = model(**batch)
        return kept["outputs"].loss

    return loss_of


@cache
def traced(size: Size, *, tied: bool, is_half: bool) -> StepTrace:
    """Return a micro-step of a model, without weights."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = LanguageModel(size, tied=tied)

        def batch_of(samples: int) -> dict[str, torch.Tensor]:
            ids = torch.zeros(samples, SEQUENCE, dtype=torch.long)
            return {"input_ids": ids, "attention_mask": ids.clone(), "labels": ids.clone()}

        program = Program(
            model=model, batch_of=batch_of, loss_of=cell(model, is_half=is_half), is_cuda=True
        )
        names = [name for name, _ in model.named_parameters()]
        return trace_step(program, optimizer=one_parameter_at_a_time(names))


def ledger_of(row: Row) -> Ledger:
    """Return what a rank takes and gives back in a row's first two steps."""
    size = LARGE if row.model == "Large" else XL
    setting = Setting(
        strategy=row.sharding if row.least_elements else "ddp",  # type: ignore[arg-type]
        world_size=row.ranks,
        cpu_offload=row.offload,
    )
    if row.least_elements is None:
        return replay(ReplicaOverlay(traced(size, tied=True, is_half=row.is_half), setting))
    trace = traced(size, tied=False, is_half=False)
    return replay(FlatParameterOverlay(trace, setting, least_elements=row.least_elements))


def parts(ledger: Ledger, batch: int) -> dict[str, float]:
    """Return what the peak is made of, by kind, in GiB."""
    total: dict[str, float] = {}
    for entry in ledger.live_after(ledger.peak_entry(batch)):
        total[entry.kind] = total.get(entry.kind, 0.0) + entry.size.at(batch) / GIB
    return {kind: round(size, 2) for kind, size in sorted(total.items()) if size >= 0.005}


def predicted(row: Row) -> dict[str, Any]:
    """Return a row beside what the planner says."""
    ledger = ledger_of(row)
    ideal = 0
    while ideal < MOST_TRIED and ledger.peak(ideal + 1) <= USABLE:
        ideal += 1
    safe = largest_that_fits(ledger, USABLE, ideal, expandable=False)
    less = USABLE - COMMUNICATION_BYTES * (row.ranks > 1)
    with_nccl = largest_that_fits(ledger, less, ideal, expandable=False)
    shown = max(safe, 1)
    reserved = reserved_peak(ledger, shown, USABLE, expandable=False)
    return {
        "model": f"GPT-2 {row.model}",
        "method": row.method,
        "gpus": row.ranks,
        "published": row.published,
        "safe": safe,
        "ideal": ideal,
        "with_nccl": with_nccl,
        "off_by": safe - row.published,
        "off_by_with_nccl": with_nccl - row.published,
        "batch_shown": shown,
        "peak_gib": round(ledger.peak(shown) / GIB, 2),
        "reserved_gib": round(reserved / GIB, 2) if reserved is not None else None,
        "gib_a_sample": round((ledger.peak(shown + 1) - ledger.peak(shown)) / GIB, 3),
        "phase": ledger.phase_of(ledger.peak_entry(shown)),
        "parts_gib": parts(ledger, shown),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table as text; ``OOM``: not even one sample."""
    lines = [
        f"{'model':12}{'method':22}{'GPUs':>5}{'published':>11}{'planned':>9}{'interval':>10}"
        f"{'with NCCL':>11}"
    ]
    for r in rows:
        shown = [str(r[key]) if r[key] else "OOM" for key in ("published", "safe", "with_nccl")]
        interval = f"{r['safe']}-{r['ideal']}"
        lines.append(
            f"{r['model']:12}{r['method']:22}{r['gpus']:>5}{shown[0]:>11}{shown[1]:>9}"
            f"{interval:>10}{shown[2]:>11}   at {r['batch_shown']}: {r['peak_gib']} GiB, reserved "
            f"{r['reserved_gib'] or 'more than there is'}, in {r['phase']}: "
            + ", ".join(f"{kind} {size}" for kind, size in r["parts_gib"].items())
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table with its terms, then all as one JSON object."""
    rows = [predicted(row) for row in ROWS]
    further = {key: sum(abs(r[key]) > 1 for r in rows) for key in ("off_by", "off_by_with_nccl")}
    say(table(rows))
    say("\nTerms:")
    for name, value, source in TERMS:
        say(f"  {name}: {value} ({source})")
    result = {
        "benchmark": "published_table",
        "machine": machine(),
        "study": STUDY,
        "vocabulary": VOCABULARY,
        "terms": [{"name": n, "value": v, "source": s} for n, v, s in TERMS],
        "rows": rows,
        "exact": {key: sum(r[key] == 0 for r in rows) for key in further},
        "further_than_one": further,
        "passes": further["off_by"] <= 1,
    }
    print(json.dumps(result))
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
