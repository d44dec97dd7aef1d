"""The five cells that anybody sees first, executed as written; data and model are small."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from kernels import Shown, kernel

pytestmark = pytest.mark.timeout(280)

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SHORT = re.findall(r"```python\n(.*?)```", README.partition("No launcher")[0], re.DOTALL)
WITH_OPTIONS = [
    *SHORT[:2],
    """%%fsdp_model --strategy full_shard --precision bf16 --activation-checkpointing
config = AutoConfig.from_pretrained("./my-model")
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
""",
    """%%fsdp_tune --data train_data                # or %fsdp_tune, which tries the last cell
loss = model(**batch).loss
""",
    """%%fsdp_train --data train_data --steps 1000 --micro-batch-size 8 --accumulate 4 --max-grad-norm 1.0
loss = model(**batch).loss
""",
]
NAMED = """%%fsdp
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8,
                    bos_token_id=0, eos_token_id=0)
if rank == 0:
    config.save_pretrained("./my-model")

def load_my_dataset():
    torch.manual_seed(0)
    rows = [(torch.arange(8) + start) % 16 for start in torch.randint(16, (128,))]
    return [{"input_ids": row, "labels": row} for row in rows]
"""
"""What a person has already: their data, and their model."""


async def run(cells: list[str], directory: str) -> list[Shown]:
    async with kernel(directory, TMPDIR=directory) as notebook:
        return [await notebook.run(cell, seconds=240) for cell in cells]


@pytest.mark.parametrize(
    "steps", [20, pytest.param(1000, marks=pytest.mark.nightly, id="as it is written")]
)
@pytest.mark.parametrize("tour", [SHORT, WITH_OPTIONS], ids=["short", "with options"])
def test_the_tour_runs(tour: list[str], steps: int, tmp_path: Path) -> None:
    assert [cell.split()[0] for cell in tour] == [
        "%load_ext", "%%fsdp", "%%fsdp_model", "%%fsdp_tune", "%%fsdp_train",
    ]  # fmt: skip
    first, *others = tour
    assert "--steps 1000" in others[-1]
    others[-1] = others[-1].replace("--steps 1000", f"--steps {steps} -o run")
    last = "print(run.state, run.steps, run.losses[-1] < run.losses[0])"
    shown = asyncio.run(run([first, NAMED, *others, last], str(tmp_path)))
    assert [each.error for each in shown] == [None] * len(shown)
    assert 'aria-label="Placement"' in shown[3].html[-1]
    assert re.search(r"Batch size +64 → .* fits; the next %%fsdp_train uses 64", shown[4].text)
    size = "8 × 4 × 2 ranks = 64" if tour is WITH_OPTIONS else "16 × 4 × 2 ranks = 128"
    assert f"{size} samples a step" in shown[5].text
    assert shown[6].text == f"done {steps} True\n"
