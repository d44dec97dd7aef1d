"""Checkpoints that every rank loads, held once per host: the weights are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from fsdp_magic.notebook.session import Session

GPT2 = GPT2Config(
    n_layer=2, n_head=2, n_embd=64, vocab_size=1009, n_positions=32, bos_token_id=0, eos_token_id=0
)
FAMILIES = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=503,
            tie_word_embeddings=False,
        )
    ),
    "bert": lambda: BertForSequenceClassification(
        BertConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=2, vocab_size=503)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=128, num_layers=2, d_ff=256, num_heads=2, vocab_size=503, d_kv=64)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            num_hidden_layers=2,
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=2,
            vocab_size=503,
        )
    ),
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=64, hidden_sizes=[128, 256], depths=[1, 1])
    ),
}
LOADED = """
import torch, transformers
model = transformers.CLASS.from_pretrained(DIRECTORYOPTIONS)
"""
CHANGES = {
    "as it is": ("", ""),
    "half": ("", "model.half()"),
    "as bfloat16": (", dtype=torch.bfloat16", ""),
    "larger embedding": (
        "",
        "torch.manual_seed(3); model.resize_token_embeddings(1021, mean_resizing=False)",
    ),
    "written": ("", "with torch.no_grad(): model.transformer.wte.weight.data.add_(1)"),
    "frozen": ("", "model.transformer.h[0].requires_grad_(False)"),
}


def check_equal(session: Session, there: torch.nn.Module) -> None:
    """Compare every parameter and buffer on the engines with a model loaded here, bit for bit."""
    got = session.pull(
        "dict([*model.named_parameters(), *model.named_buffers()])", rank=session.world_size - 1
    )
    wanted = dict([*there.named_parameters(), *there.named_buffers()])
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor.detach()), name
    frozen = "[n for n, p in model.named_parameters() if not p.requires_grad]"
    assert session.pull(frozen) == [n for n, p in there.named_parameters() if not p.requires_grad]


def load(session: Session, kind: str, directory: Path, options: str = "", then: str = "") -> None:
    code = LOADED.replace("CLASS", kind).replace("DIRECTORY", repr(str(directory)))
    session.model(f"{code.replace('OPTIONS', options)}\n{then}\n", show=False)


@pytest.mark.parametrize(
    "change",
    [
        name if name in ("as it is", "written") else pytest.param(name, marks=pytest.mark.nightly)
        for name in CHANGES
    ],
)
def test_loaded_weights_are_those_of_a_plain_load(session, tmp_path, change) -> None:
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    options, then = CHANGES[change]
    load(session, "GPT2LMHeadModel", tmp_path, options, then)
    names = {"torch": torch}
    exec(
        f"import transformers\nmodel = transformers.GPT2LMHeadModel.from_pretrained("
        f"{str(tmp_path)!r}{options})\n{then}",
        names,
    )
    check_equal(session, names["model"])


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_as_it_is(session, tmp_path, family) -> None:
    kind = type(built := FAMILIES[family]())
    built.save_pretrained(tmp_path)
    load(session, kind.__name__, tmp_path)
    check_equal(session, kind.from_pretrained(tmp_path))


@pytest.mark.nightly
def test_a_head_that_the_file_lacks_is_initialised_and_said_once(session, tmp_path) -> None:
    FAMILIES["bert"]().bert.save_pretrained(tmp_path)
    load(session, "BertForSequenceClassification", tmp_path)
    got = session.pull("dict(model.named_parameters())")
    for name, tensor in AutoModel.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(got[f"bert.{name}"], tensor)
    assert got["classifier.weight"].std() > 0


def test_weights_are_mapped_and_nothing_is_mapped_afterwards(session, tmp_path) -> None:
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path)
    count = "sum('model.safetensors' in line for line in open('/proc/self/maps'))"
    then = f"inside = {count}\nteacher = torch.nn.Linear(2, 2)\nteacher.weight.data = "
    then += "model.transformer.wte.weight.data"
    load(session, "GPT2LMHeadModel", tmp_path, then=then)
    assert all(session.pull("inside > 5", rank="all"))
    wanted = GPT2LMHeadModel.from_pretrained(tmp_path).transformer.wte.weight.detach().clone()
    assert session.pull(count, rank="all") == [0, 0]
    # the same folder written again changes nothing that was loaded from it
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"")
    assert torch.equal(session.pull("model.transformer.wte.weight"), wanted)
    assert torch.equal(session.pull("teacher.weight"), wanted)
    assert not session.pull("'MappedCheckpoints' in repr(__import__('safetensors').safe_open)")
