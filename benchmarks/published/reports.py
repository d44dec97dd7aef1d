"""What other reports ran, as far as they say it: each a function from nothing to predictions.

Programs of 2022 are spread as they were then, by the overlays beside this file; programs of today
are given to ``fsdp_magic.plan`` as a person would. Where a report leaves a setting open, a range is
predicted. The names of reports and cells are those of ``held_out.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

import fsdp_magic
from fsdp_magic.core.planning.allocator import largest_that_fits, reserved_peak
from fsdp_magic.core.planning.ledger import Ledger
from fsdp_magic.core.planning.overlay import Setting, replay
from fsdp_magic.core.planning.step_trace import StepTrace
from fsdp_magic.core.units import GIB, MIB
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.tracing import trace_step
from published.flat_parameters import FlatParameterOverlay
from published.loops import one_parameter_at_a_time
from published.replicas import ReplicaOverlay

GB = 1e9
PLENTY = 1 << 42
MOST_TRIED = 512
Prediction = float | tuple[float, float]
Predictions = dict[str, Prediction | str]


# -- programs of 2022


def bert_large(kind: type[Any]) -> nn.Module:
    """Return BERT-large, its attention computed operator by operator."""
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "eager"
    model: nn.Module = kind(config)
    return model


def traced(
    kind: type[Any], length: int, *, is_half: bool = False, is_checkpointed: bool = False
) -> StepTrace:
    """Return a micro-step of BERT-large under AdamW of its time."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = bert_large(kind)
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})

        def batch_of(samples: int) -> dict[str, torch.Tensor]:
            ids = torch.zeros(samples, length, dtype=torch.long)
            labels = ids if kind is BertForMaskedLM else torch.zeros(samples, dtype=torch.long)
            return {"input_ids": ids, "labels": labels.clone()}

        def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if not is_half:
                return model(**batch).loss  # type: ignore[no-any-return]
            with torch.autocast("cuda", dtype=torch.float16):
                return model(**batch).loss  # type: ignore[no-any-return]

        program = Program(model=model, batch_of=batch_of, loss_of=loss_of, is_cuda=True)
        names = [name for name, _ in model.named_parameters()]
        return trace_step(program, optimizer=one_parameter_at_a_time(names, temporaries=2))


def alone(trace: StepTrace, *, accumulate: int = 1) -> Ledger:
    """Return what one GPU by itself takes, with gradients that are zeroed."""
    return replay(ReplicaOverlay(trace, Setting(world_size=1, accumulate=accumulate)))


def reserved(ledger: Ledger, batch: int, *, expandable: bool = False) -> int:
    """Return the most bytes reserved, on a device with room for all."""
    peak = reserved_peak(ledger, batch, PLENTY, expandable=expandable)
    assert peak is not None
    return peak


def largest(ledger: Ledger, usable: float) -> int:
    """Return the largest batch that fits into so many bytes."""
    return largest_that_fits(ledger, round(usable), MOST_TRIED, expandable=False)


def v100_bert_large() -> Predictions:
    """Return what NVML shows: 1343 MiB before any model, and what torch reserves."""
    outside = 1343
    plain = traced(BertForSequenceClassification, 512)
    half = traced(BertForSequenceClassification, 512, is_half=True)
    saved = traced(BertForSequenceClassification, 512, is_checkpointed=True)
    both = traced(BertForSequenceClassification, 512, is_half=True, is_checkpointed=True)

    def used(trace: StepTrace, batch: int, accumulate: int = 1) -> float:
        return outside + reserved(alone(trace, accumulate=accumulate), batch) / MIB

    return {
        "batch 4": used(plain, 4),
        "batch 1, accumulated 4": used(plain, 1, 4),
        "batch 1, accumulated 4, gradient checkpointing": used(saved, 1, 4),
        "batch 4, fp16": used(half, 4),
        "batch 1, accumulated 4, gradient checkpointing, fp16": used(both, 1, 4),
    }


def modelcenter_bert_large() -> Predictions:
    """Return largest batches with 1.4 to 0.9 GB outside torch's allocator."""
    ledgers = {
        is_half: alone(traced(BertForMaskedLM, 512, is_half=is_half)) for is_half in (False, True)
    }

    def between(ledger: Ledger, capacity: float) -> Prediction:
        return tuple(float(largest(ledger, capacity - n * GB)) for n in (1.4, 0.9))  # type: ignore[return-value]

    v100, ti = 32510 * MIB, 11019 * MIB
    return {
        "V100 32 GB": between(ledgers[False], v100),
        "V100 32 GB, fp16": between(ledgers[True], v100),
        "2080Ti 11 GB": between(ledgers[False], ti),
    }


def study_bert_large() -> Predictions:
    """Return peaks of DDP and FSDP at batch 16, for sequences of 80 to 104 tokens."""
    peaks: dict[str, list[float]] = {}
    for length in (80, 104):
        trace = traced(BertForSequenceClassification, length)
        setting = Setting(world_size=2)
        overlays: dict[str, Any] = {"DDP": ReplicaOverlay(trace, Setting(strategy="ddp"))}
        for name, least in (("none", None), ("1M", 1_000_000), ("2k", 2000)):
            overlays[name] = FlatParameterOverlay(trace, setting, least_elements=least)
        for name, overlay in overlays.items():
            peaks.setdefault(name, []).append(replay(overlay).peak(16) / MIB)

    def ratio(a: str, b: str) -> Prediction:
        low, high = sorted(x / y for x, y in zip(peaks[a], peaks[b], strict=True))
        return round(low, 3), round(high, 3)

    between = all(a < b < c for a, b, c in zip(peaks["1M"], peaks["none"], peaks["DDP"]))
    return {
        "DDP over FSDP with 1M": ratio("DDP", "1M"),
        "FSDP 2k over FSDP 1M": ratio("2k", "1M"),
        "FSDP without auto-wrap": f"{'between' if between else 'not between'} FSDP 1M and DDP: "
        + ", ".join(f"{name} {low:.0f}-{high:.0f} MiB" for name, (low, high) in peaks.items()),
        "DDP": (peaks["DDP"][0], peaks["DDP"][1]),
    }


# -- programs of today

LLAMA_2_7B = "LlamaConfig()"
LLAMA_2_13B = (
    "LlamaConfig(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, "
    "num_attention_heads=40, num_key_value_heads=40)"
)
LLAMA_3_8B = (
    "LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, "
    "num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)"
)
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM({config})
model.config.use_cache = False
"""
LORA = """
from torch import nn
from torch.nn import functional

class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 8, bias=False, dtype=torch.bfloat16)
        self.b = nn.Linear(8, base.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.b(self.a(functional.dropout(x, 0.05, self.training))) * 2.0

model = model.to(torch.bfloat16).requires_grad_(False)
for layer in model.model.layers:
    for name in ("q_proj", "v_proj"):
        setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
"""
LOGITS_IN_BF16 = """
def loss_fn(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)
    )
"""
KEEPS_OUTPUTS = """
model.config.use_cache = True
def loss_fn(model, batch):
    global outputs
    outputs = model(**batch)
    return outputs.loss
"""


def planned(code: str, strategies: Iterable[str], **options: Any) -> Any:
    """Return the plan of a program, on a device with room for all."""
    return fsdp_magic.plan(
        code, strategies=list(strategies), gpu_memory="400GiB", show=False, **options
    )


def torchtitan_7b() -> Predictions:
    """Return peaks of full_shard on 8 GPUs at batch 8 of 2048 tokens; reserved: both modes."""
    saved, whole = "full_shard+bf16+activation_checkpointing", "full_shard+bf16"
    plan = planned(LLAMA.format(config=LLAMA_2_7B), (saved, whole), world_size=8, seq_len=2048)

    def between(strategy: str) -> Prediction:
        modes = (reserved(plan[strategy].ledger, 8, expandable=mode) for mode in (True, False))
        low, high = sorted(peak / GIB for peak in modes)
        return low, high

    return {
        "AC, active": plan.peak_bytes(saved, 8) / GIB,
        "AC, reserved": between(saved),
        "none, compiled, reserved": between(whole),
    }


def torchtitan_8b() -> Predictions:
    """Return peaks of full_shard on 8 and 128 GPUs at batch 2 of 8192 tokens."""
    saved, whole = "full_shard+bf16+activation_checkpointing", "full_shard+bf16"
    code = LLAMA.format(config=LLAMA_3_8B)
    plans = {
        ranks: planned(code, (saved, whole), world_size=ranks, seq_len=8192) for ranks in (8, 128)
    }
    peaks = {
        ranks: tuple(plan.peak_bytes(name, 2) / GIB for name in (saved, whole))
        for ranks, plan in plans.items()
    }
    differences = sorted(a - b for a, b in zip(peaks[8], peaks[128]))
    return {
        "8 GPUs less 128 GPUs": (differences[0], differences[-1]),
        "8 GPUs": (peaks[8][0], peaks[8][1]),
        "128 GPUs": (peaks[128][0], peaks[128][1]),
    }


def litgpt_lora() -> Predictions:
    """Return peaks of LoRA in bf16 on one GPU, at 1304 tokens."""
    found: Predictions = {}
    for name, config in (("7B", LLAMA_2_7B), ("13B", LLAMA_2_13B)):
        code = LLAMA.format(config=config) + LORA + LOGITS_IN_BF16
        plan = planned(code, ("ddp",), world_size=1, seq_len=1304)
        for batch in (1, 2) if name == "7B" else (1,):
            found[f"{name}, batch {batch}"] = plan.peak_bytes("ddp", batch) / GB
        # The driver shows 40,536 MiB of such a card; 0.9 to 1.4 GB are not torch's.
        sizes = [largest(plan["ddp"].ledger, 40536 * MIB - n * GB) for n in (1.4, 0.9)]
        found[f"{name}, 40 GB"] = (float(sizes[0]), float(sizes[1]))
    return found


def forum_gpt2() -> Predictions:
    """Return the peak of GPT-2 at batch 8 of 512 tokens."""
    code = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
"""
    plan = planned(code, ("ddp",), world_size=1, seq_len=512)
    return {"batch 8": plan.peak_bytes("ddp", 8) / GIB}


def llama_recipes_7b() -> Predictions:
    """Return peaks of LoRA in bf16 on four GPUs at batch 4 of 2048 tokens, checkpointed."""
    saved = "full_shard+activation_checkpointing"
    plain = LLAMA.format(config=LLAMA_2_7B) + LORA
    found: Predictions = {}
    for name, code in (
        ("logits not kept", plain),
        ("logits and key-values kept", plain + KEEPS_OUTPUTS),
    ):
        plan = planned(code, (saved,), world_size=4, seq_len=2048)
        found[name] = plan.peak_bytes(saved, 4) / GB
    return found


REPORTS: dict[str, Callable[[], Predictions]] = {
    "study-bert-large": study_bert_large,
    "v100-bert-large": v100_bert_large,
    "modelcenter-bert-large": modelcenter_bert_large,
    "torchtitan-7b": torchtitan_7b,
    "torchtitan-8b": torchtitan_8b,
    "litgpt-lora": litgpt_lora,
    "forum-gpt2": forum_gpt2,
    "llama-recipes-7b": llama_recipes_7b,
}
