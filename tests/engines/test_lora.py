"""LoRA with peft: a frozen base and trainable adapters in one unit."""

from __future__ import annotations

import pytest
from equality import assert_equal
from programs import Program, in_one_process, on_engines

from fsdp_magic.errors import FsdpError

STRATEGIES = ("full_shard", "shard_grad_op")
BUILT = """
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config

torch.manual_seed(1)
config = GPT2Config(
    n_layer=2, n_head=2, n_embd=32, vocab_size=53, n_positions=16,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)
base = AutoModelForCausalLM.from_config(config).to(BASE)
adapters = LoraConfig(
    r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True,
    init_lora_weights=False,
)
model = get_peft_model(base, adapters, autocast_adapter_dtype=False).train()
del base
for p in model.parameters():
    if p.requires_grad:
        p.data = p.data.to(ADAPTERS)
generator = torch.Generator().manual_seed(2)
data = [(row,) for row in torch.randint(0, 53, (192, 12), generator=generator)]
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9
)
"""
CELL = """
(ids,) = batch
logits = model(input_ids=ids).logits
loss = F.cross_entropy(logits[:, :-1].reshape(-1, 53), ids[:, 1:].reshape(-1))
"""


def built(base: str, adapters: str) -> str:
    return BUILT.replace("BASE", f"torch.{base}").replace("ADAPTERS", f"torch.{adapters}")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of peft, about transformers
@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        ("full_shard", 2),
        ("shard_grad_op", 1),
        pytest.param("full_shard", 1, marks=pytest.mark.nightly),
        pytest.param("shard_grad_op", 2, marks=pytest.mark.nightly),
    ],
)
def test_adapters_train_as_in_one_process(session, strategy, accumulate):
    program = Program(built=built("float64", "float64"), cell=CELL)
    measured = on_engines(session, program, strategy=strategy, accumulate=accumulate)
    assert_equal(measured, in_one_process(program, accumulate=accumulate), tolerance=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_bfloat16_base_keeps_its_type_and_gets_no_gradient(session, strategy):
    program = Program(built=built("bfloat16", "float32"), cell=CELL)
    session.model(program.built, strategy=strategy, show=False)
    assert {p.unit for p in session.shards(show=False).parameters if "lora" in p.name} == {
        f"base_model.model.transformer.h.{block}" for block in range(2)
    }
    session.run(
        "from fsdp_magic.engine.parallel import torch_private\n"
        "frozen = {}\n"
        "def look(*_):\n"  # between backward and the optimizer step
        "    for _, unit in torch_private.units(model):\n"
        "        for group in torch_private.parameter_groups(unit):\n"
        "            for p in group.fsdp_params:\n"
        "                if not p.sharded_param.requires_grad:\n"
        "                    frozen[p._param_fqn] = (\n"
        "                        p.sharded_param.grad, p._unsharded_param.grad,\n"
        "                        p.unsharded_accumulated_grad)\n"
        "handle = optimizer.register_step_pre_hook(look)\n"
        "before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}",
        show=False,
    )
    run = session.train(CELL, data="data", steps=3, accumulate=2, micro_batch_size=4, show=False)
    assert run.steps == 3
    session.run(
        "held = optimizer.param_groups[0]['params']\n"
        "after = {n: p.full_tensor() for n, p in model.named_parameters()}\n"
        "moved = {n for n in after if not torch.equal(before[n], after[n])}\n"
        "adapted = {n for n, p in model.named_parameters() if p.requires_grad}",
        show=False,
    )
    kept = session.pull("list(frozen.values())", rank="all")
    assert [len(entries) for entries in kept] == [28, 28]
    assert all(entry == (None, None, None) for ranks in kept for entry in ranks)
    assert session.pull("{str(p.dtype) for n, p in after.items() if n not in adapted}") == {
        "torch.bfloat16"
    }
    assert session.pull("moved == adapted and len(held) == len(adapted) == 4")
    assert session.pull("{str(p.dtype) for p in held}") == {"torch.float32"}


def test_trainable_parameters_of_two_types_are_in_two_units(session):
    code = built("bfloat16", "float32") + (
        "model.base_model.model.transformer.h[1].ln_1.weight.requires_grad_(True)\n"
    )
    units = {p.name: p.unit for p in session.model(code, show=False).parameters}
    block = "base_model.model.transformer.h.1"
    assert units[f"{block}.ln_1.weight"] == f"{block}.ln_1"
    assert {unit for name, unit in units.items() if "lora" in name and ".h.1." in name} == {block}


def test_trainable_parameters_of_two_types_in_one_module_are_refused_by_name(session):
    code = built("bfloat16", "float32") + (
        "norm = model.base_model.model.transformer.h[1].ln_1.requires_grad_(True)\n"
        "norm.weight.data = norm.weight.data.float()\n"
    )
    both = r"h\.1\.ln_1\.weight \(float32\).*h\.1\.ln_1\.bias \(bfloat16\)"
    with pytest.raises(FsdpError, match=both):
        session.model(code, show=False)
    assert session.pull("type(norm.weight).__name__") == "Parameter"  # nothing was sharded
