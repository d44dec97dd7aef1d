"""Predicted peaks of memory beside measured ones, on CPU engines with gloo.

A case is a shape of model, a strategy, a precision, checkpointing, accumulation, an optimizer, a
micro-batch size and a number of engines. It is trained for real, and the peak is taken from the
events of the allocator on every rank (``tests/engines/allocator_events.py``), which is first held
against allocations that can be added up by hand. The prediction is that of one trace of the same
cells without weights and without engines.

Half of the cases are named here. The others are drawn by ``--seed`` from all that could be; the
record says which commit and which seed.

    python benchmarks/plan_accuracy.py --seed 1 > benchmarks/results/plan_accuracy.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from side_by_side import machine, say

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines"))

from allocator_events import measured, of_known_pattern  # noqa: E402
from planned_cells import trace_of  # noqa: E402

import fsdp_magic  # noqa: E402
from fsdp_magic.core.planning.overlay import Setting  # noqa: E402
from fsdp_magic.core.planning.step_trace import StepTrace  # noqa: E402
from fsdp_magic.core.planning.strategies import ledger_of  # noqa: E402
from fsdp_magic.core.units import MIB  # noqa: E402
from fsdp_magic.notebook.session import Session  # noqa: E402

MEDIAN_BOUND, WORST_BOUND = 1.0, 5.0
"""Percent."""
STEPS = 4
_LANGUAGE_CELL = """
ids = torch.arange(MICRO_BATCH * 64).remainder(3000).reshape(MICRO_BATCH, 64)
out = model(input_ids=ids, labels=ids)
loss = out.loss
"""
SHAPES = {
    "gpt2": (
        """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(
    n_embd=192, n_layer=24, n_head=4, vocab_size=3000, n_positions=128, use_cache=False,
    bos_token_id=0, eos_token_id=0,
))
""",
        _LANGUAGE_CELL,
    ),
    "llama": (
        """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=192, intermediate_size=512, num_hidden_layers=24, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=3000, use_cache=False,
))
""",
        _LANGUAGE_CELL,
    ),
    "bert": (
        """
import torch
from transformers import BertConfig, BertForMaskedLM
model = BertForMaskedLM(BertConfig(
    hidden_size=192, intermediate_size=768, num_hidden_layers=24, num_attention_heads=4,
    vocab_size=3000, max_position_embeddings=128,
))
""",
        _LANGUAGE_CELL,
    ),
    "cnn": (
        """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.first = nn.Conv2d(width, width, 5, padding=2), nn.BatchNorm2d(width)
        self.two, self.second = nn.Conv2d(width, width, 5, padding=2), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.second(self.two(torch.relu(self.first(self.one(x))))))

class Net(nn.Module):
    def __init__(self, width=80):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(28))
        self.head = nn.Linear(width, 100)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

model = Net()
""",
        """
images = torch.ones(MICRO_BATCH, 3, 8, 8)
scores = model(images)
classes = torch.zeros(MICRO_BATCH, dtype=torch.long)
loss = torch.nn.functional.cross_entropy(scores, classes)
""",
    ),
}
"""The cells of each shape: those that build the model and train it.

Of 35 to 45 MiB in many small layers, so that what gloo lets go late, a copy of one layer or one
bucket of gradients, is little of the whole. The kernels of 5 x 5 are oneDNN's for any number of
samples: of smaller ones torch computes a single small image by itself (``ConvParams::use_mkldnn``
in aten/src/ATen/native/Convolution.cpp).
"""
LEFT = ("ids", "out", "images", "scores", "classes")
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)",
    "adamw_foreach": "torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained and planned."""

    shape: str = "gpt2"
    strategy: str = "full_shard"
    precision: str = "fp32"
    activation_checkpointing: str = ""
    accumulate: int = 1
    accumulate_sync: str = "every"
    optimizer: str = "adamw"
    micro_batch_size: int = 4
    engines: int = 2

    @property
    def is_sensible(self) -> bool:
        """Whether no option is without effect."""
        whole = self.strategy in ("ddp", "zero1")
        return self.accumulate_sync == "every" or (self.accumulate > 1 and not whole)


NAMED = (
    Case(strategy="ddp"),
    Case(shape="llama", strategy="ddp", optimizer="sgd", micro_batch_size=1),
    Case(shape="bert", strategy="ddp", precision="bf16"),
    Case(shape="cnn", strategy="ddp"),
    Case(strategy="zero1", activation_checkpointing="blocks"),
    Case(shape="llama", strategy="zero1", precision="bf16", optimizer="adamw_foreach"),
    Case(shape="bert", strategy="shard_grad_op", accumulate=3, accumulate_sync="last"),
    Case(shape="llama", strategy="shard_grad_op", micro_batch_size=2),
    Case(shape="cnn", strategy="shard_grad_op", activation_checkpointing="blocks"),
    Case(shape="bert", precision="bf16", activation_checkpointing="blocks"),
    Case(precision="bf16", accumulate=2, accumulate_sync="last", micro_batch_size=1),
    Case(shape="llama", optimizer="sgd", micro_batch_size=1),
    Case(shape="cnn", precision="bf16", micro_batch_size=8),
    Case(shape="llama", engines=4, accumulate=2),
    Case(shape="cnn", strategy="zero1", engines=4),
)
SPACE: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "strategy": ("ddp", "zero1", "shard_grad_op", "full_shard"),
    "precision": ("fp32", "bf16"),
    "activation_checkpointing": ("", "blocks", "selective"),
    "accumulate": (1, 2, 4),
    "accumulate_sync": ("every", "last"),
    "optimizer": tuple(OPTIMIZERS),
    "micro_batch_size": (1, 2, 4, 8),
    "engines": (2, 4),
}


def drawn(seed: int, number: int) -> list[Case]:
    """Return cases that a seed draws from all that are sensible and not named here."""
    every = (Case(**dict(zip(SPACE, values, strict=True))) for values in _products())
    return random.Random(seed).sample(
        [c for c in every if c.is_sensible and c not in NAMED], number
    )


def _products() -> itertools.product[Any]:
    return itertools.product(*SPACE.values())


# -- predicted


def predicted(case: Case, traces: dict[tuple[str, ...], StepTrace]) -> int:
    """Return the peak that a plan gives."""
    key = (case.shape, case.precision, case.activation_checkpointing, case.optimizer)
    if key not in traces:
        traces[key] = _trace(case)
    setting = Setting(
        strategy=case.strategy,  # type: ignore[arg-type]
        world_size=case.engines,
        accumulate=case.accumulate,
        accumulate_sync=case.accumulate_sync,  # type: ignore[arg-type]
        backend="gloo",
    )
    return round(ledger_of(traces[key], setting).peak(case.micro_batch_size))


def _trace(case: Case) -> StepTrace:
    """Trace a case's cells without weights."""
    build, cell = SHAPES[case.shape]
    return trace_of(
        f"{build}optimizer = {OPTIMIZERS[case.optimizer]}",
        lambda samples: cell.replace("MICRO_BATCH", str(samples)),
        precision=case.precision,
        activation_checkpointing=case.activation_checkpointing,
    )


# -- measured


def compare(
    session: Session, case: Case, traces: dict[tuple[str, ...], StepTrace]
) -> dict[str, Any]:
    """Return a case with what was predicted and measured, in bytes, and the error in percent."""
    build, cell = SHAPES[case.shape]
    options = {
        "strategy": case.strategy,
        "precision": case.precision,
        "activation_checkpointing": case.activation_checkpointing or None,
        "accumulate_sync": case.accumulate_sync if case.accumulate_sync != "every" else None,
    }
    peak = predicted(case, traces)
    peaks = measured(
        session,
        f"{build}optimizer = {OPTIMIZERS[case.optimizer]}",
        cell.replace("MICRO_BATCH", str(case.micro_batch_size)),
        steps=STEPS,
        left=LEFT,
        training={"accumulate": case.accumulate},
        **{name: value for name, value in options.items() if value is not None},
    )
    error = 100 * (peak / peaks.highest - 1)
    defaults = {field.name: field.default for field in fields(Case)}
    said = {n: v for n, v in asdict(case).items() if v != defaults[n]}
    say(f"{error:+6.2f} %  {peak / MIB:7.2f} MiB of {peaks.highest / MIB:7.2f}  {said}")
    return {
        **asdict(case),
        "predicted": peak,
        "measured": peaks.highest,
        "error_percent": round(error, 3),
        "lowest_of_later_steps": peaks.lowest,
        "measured_by_step": peaks.by_step,
    }


def of_cases(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measure cases, those of as many engines in one session."""
    found: dict[Case, dict[str, Any]] = {}
    traces: dict[tuple[str, ...], StepTrace] = {}
    for engines in sorted({case.engines for case in cases}):
        with fsdp_magic.init(n=engines, device="cpu", show=False) as session:
            _settle(session, engines)
            for case in cases:
                if case.engines == engines:
                    found[case] = compare(session, case, traces)
    return [found[case] for case in cases]


def _settle(session: Session, engines: int) -> None:
    """Hold the measure against what is known, and have made what is made once in a process."""
    session.run("import torch", show=False)
    of_known_pattern(session)
    known, expected = of_known_pattern(session), (2 * engines + 2) * MIB
    assert all(expected <= peak < expected + 4096 for peak in known), known
    build, cell = SHAPES["cnn"]
    model = f"{build}optimizer = {OPTIMIZERS['sgd']}"
    measured(session, model, cell.replace("MICRO_BATCH", "1"), steps=1, left=LEFT)


def commit() -> str:
    """Return the commit that this ran from; marked if files differ from it."""
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip()


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median and the worst error, in percent of what was measured."""
    errors = [abs(case["error_percent"]) for case in cases]
    return {"median": round(statistics.median(errors), 3), "worst": max(errors)}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the cases that are not named")
    parser.add_argument("--drawn", type=int, default=15, help="how many are drawn")
    asked = parser.parse_args()
    where, before = commit(), machine()
    named = of_cases(NAMED)
    held_out = of_cases(drawn(asked.seed, asked.drawn))
    errors = summary([*named, *held_out])
    found = {
        "benchmark": "plan_accuracy",
        "machine": before,
        "commit": where,
        "seed": asked.seed,
        "error_percent": errors,
        "of_named": summary(named),
        "of_drawn": summary(held_out) if held_out else None,
        "named": named,
        "drawn": held_out,
        "passes": errors["median"] <= MEDIAN_BOUND and errors["worst"] <= WORST_BOUND,
    }
    print(json.dumps(found))
    sys.exit(0 if found["passes"] else 1)


if __name__ == "__main__":
    main()
