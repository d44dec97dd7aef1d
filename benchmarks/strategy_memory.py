"""Bytes per parameter at the peak of a training step, under each strategy, on CPU engines.

First a stack of equal layers, float32 with AdamW, so large that its activations are nothing, on
two and on four engines; beside each figure what theory gives for torch's implementations. Then a
BERT-large-shaped model on two engines: ``ddp``, ``full_shard``, and ``full_shard`` with units
wrapped by size.

Each rank looks 200 times a second at what the C library's allocator has given out, in the steps
after the optimizer's state is there; so buffers of the transport count too. What was given out
before the model was built is taken off, after a small model was trained the same way. Two
micro-steps make a step: from the second on the gradients of the first are there while parameters
are gathered, as the formulas have it.

What is above the formula belongs to a unit, and is given in units: parameters gathered while it
computes, those of the next, its gradient whole, the transport's buffers, and the temporaries of
the optimizer, which are as large as its largest shard.

With ``--deep`` the stack has hundreds of layers, so that a unit is a small part of it: there every
strategy is to be within 2 % and one unit of its formula.

    python benchmarks/strategy_memory.py [--bert] [--wraps]
    python benchmarks/strategy_memory.py --deep
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from side_by_side import machine, say

import fsdp_magic
from fsdp_magic.core.units import MIB
from fsdp_magic.notebook.session import Session

WIDTH, LAYERS = 1024, 16
BERT_BOUND = 0.6
"""Peak of ``full_shard`` over that of ``ddp``, on two engines."""
THEORY = {
    "ddp": lambda n: 16.0,
    "zero1": lambda n: 8 + 8 / n,
    "shard_grad_op": lambda n: 4 + 16 / n,
    "full_shard": lambda n: 16 / n,
}
LAST = " --accumulate-sync last"
BF16 = " --precision bf16"
DEEP: dict[str, tuple[int, int]] = {
    "ddp": (640, 300),
    "zero1": (640, 300),
    "shard_grad_op": (640, 300),
    "shard_grad_op" + BF16: (1024, 400),
    "full_shard": (1024, 500),
    "full_shard" + LAST: (640, 300),
}
"""Width and layers of the stack; more where the formula leaves less beside a unit."""
DEEP_SHARE = 0.02

WATCH = """
import ctypes, gc, threading, time
import torch
from torch import nn
from fsdp_magic.engine import telemetry

class Watch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()
    def run(self):
        while not self.over.wait(1 / 200):
            self.peak = max(self.peak, telemetry.memory().allocated_bytes)

def settled_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return telemetry.memory().allocated_bytes

before = settled_bytes()
"""
STACK = """
class Stack(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        def block():
            return nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh())
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

model = Stack(WIDTH, LAYERS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
"""
STACK_CELL = "loss = model(torch.ones(1, model.blocks[0][0].in_features)).square().mean()"
BERT = """
from transformers import BertConfig, BertForMaskedLM
torch.manual_seed(0)
config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                    intermediate_size=4096)
model = BertForMaskedLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
"""
BERT_CELL = """
ids = torch.arange(16).reshape(1, 16)
loss = model(input_ids=ids, labels=ids).loss
"""


def stack(width: int, layers: int) -> str:
    """Return the code of a stack of layers."""
    return STACK.replace("WIDTH", str(width)).replace("LAYERS", str(layers))


def peaks(
    session: Session, model: str, cell: str, *, accumulate: int, **options: Any
) -> tuple[list[float], int]:
    """Return the peak of each rank in bytes per parameter, and the number of parameters."""
    session.run("import torch\nfrom torch import nn", show=False)
    session.model(stack(64, 2), "model", show=False, **options)
    session.train(STACK_CELL, steps=2, accumulate=accumulate, show=False)
    session.run("del model, optimizer, loss\nimport gc; gc.collect()", show=False)
    session.run(WATCH, show=False)
    placement = session.model(model, "model", show=False, **options)
    session.train(cell, steps=1, accumulate=accumulate, show=False)
    session.run("watch = Watch(); watch.start()", show=False)
    session.train(cell, steps=2, accumulate=accumulate, show=False)
    session.run("watch.over.set(); watch.join()", show=False)
    bytes_ = session.pull("watch.peak - before", rank="all")
    session.run("del model, optimizer, loss, watch; gc.collect()", show=False)
    return [peak / placement.parameter_count for peak in bytes_], placement.parameter_count


def of_stack(engines: int, strategies: list[str]) -> dict[str, Any]:
    """Measure the stack of layers under strategies."""
    figures: dict[str, Any] = {}
    with fsdp_magic.init(n=engines, device="cpu", show=False) as session:
        for strategy in strategies:
            name, last, _ = strategy.partition(LAST)
            options = {"accumulate_sync": "last"} if last else {}
            measured, count = peaks(
                session, stack(WIDTH, LAYERS), STACK_CELL, accumulate=2, strategy=name, **options
            )
            expected = THEORY[name](engines) + (4 if last else 0)
            figures[strategy] = {
                "expected": expected,
                "measured": [round(each, 3) for each in measured],
                "units_more": round((max(measured) - expected) * count / (4 * WIDTH**2), 2),
            }
            say(f"{engines} engines, {strategy}: {figures[strategy]}")
    return figures


def of_deep_stack(engines: int) -> dict[str, Any]:
    """Measure each strategy on a stack whose units are small, against the bound."""
    figures: dict[str, Any] = {}
    for strategy, (width, layers) in DEEP.items():
        name, _, option = strategy.partition(" --")
        options: dict[str, Any] = dict([option.replace("-", "_").split()]) if option else {}
        if name not in ("ddp", "zero1"):
            options["meta"] = True  # else every rank builds the whole model first
        # with a limit malloc gives what is freed back to the system, and less memory is needed
        limited = fsdp_magic.init(n=engines, device="cpu", memory_limit="16GiB", show=False)
        with limited as session:
            measured, _ = peaks(
                session, stack(width, layers), STACK_CELL, accumulate=2, strategy=name, **options
            )
        expected = 2 + 16 / engines if BF16 in strategy else THEORY[name](engines)
        expected += 4 if LAST in strategy else 0
        bound = (1 + DEEP_SHARE) * expected + 4 / layers
        figures[strategy] = {
            "width": width,
            "layers": layers,
            "expected": expected,
            "bound": round(bound, 3),
            "measured": [round(each, 3) for each in measured],
            "passes": max(measured) <= bound,
        }
        say(f"{engines} engines, {strategy}: {figures[strategy]}")
    return figures


def of_bert(ways: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Measure the BERT-large-shaped model on two engines, each way in a session of its own."""
    figures: dict[str, Any] = {}
    for way, options in ways.items():
        with fsdp_magic.init(n=2, device="cpu", show=False) as session:
            measured, count = peaks(session, BERT, BERT_CELL, accumulate=1, **options)
        figures[way] = {
            "parameters": count,
            "bytes_per_parameter": [round(each, 3) for each in measured],
            "peak_mib": round(max(measured) * count / MIB),
        }
        say(f"BERT-large, {way}: {figures[way]}")
    return figures


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bert", action="store_true", help="the BERT-large-shaped model too")
    parser.add_argument("--wraps", action="store_true", help="it also with units by size")
    parser.add_argument("--deep", action="store_true", help="a stack of small units, nothing else")
    asked = parser.parse_args()
    if asked.deep:
        deep = {str(n): of_deep_stack(n) for n in (2, 4)}
        passed = all(each["passes"] for figures in deep.values() for each in figures.values())
        found: dict[str, Any] = {"benchmark": "strategy_memory", "machine": machine(), "deep": deep}
        print(json.dumps(found | {"passed": passed}))
        sys.exit(0 if passed else 1)
    strategies = [*THEORY, "full_shard" + LAST]
    found = {
        "benchmark": "strategy_memory",
        "machine": machine(),
        "unit_bytes_per_parameter_of_stack": 4 / LAYERS,
        "engines": {str(n): of_stack(n, strategies) for n in (2, 4)},
    }
    if asked.bert:
        ways = {"ddp": {"strategy": "ddp"}, "full_shard": {"strategy": "full_shard"}}
        if asked.wraps:
            ways |= {f"size:{n}": {"wrap": f"size:{n}"} for n in (2_000, 1_000_000)}
        figures = found["bert_large"] = of_bert(ways)
        ratio = figures["full_shard"]["peak_mib"] / figures["ddp"]["peak_mib"]
        found["bert_full_shard_over_ddp"] = round(ratio, 3)
        found["passed"] = ratio <= BERT_BOUND
    print(json.dumps(found))
    sys.exit(0 if found.get("passed", True) else 1)


if __name__ == "__main__":
    main()
