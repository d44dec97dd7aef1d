"""Small models of many families of ``transformers``, as code that builds them.

``S``, ``LM``: the sizes that most configurations share.
"""

from __future__ import annotations

SIZES = """
import torch
import transformers as C
S = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
LM = dict(vocab_size=53, **S)
TINY = dict(vocab_size=53, d_model=32, encoder_layers=2, decoder_layers=2, pad_token_id=0,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    bos_token_id=0, eos_token_id=0, decoder_start_token_id=0)
GROUPED = dict(num_key_value_heads=2, **LM)
IMAGE = dict(image_size=32, patch_size=8)
"""

FAMILIES = {
    "gpt2": "C.GPT2LMHeadModel(C.GPT2Config(n_layer=3, n_head=4, n_embd=32, vocab_size=53, "
    "n_positions=16, bos_token_id=0, eos_token_id=0))",
    "gpt_neox": "C.GPTNeoXForCausalLM(C.GPTNeoXConfig(**LM))",
    "opt": "C.OPTForCausalLM(C.OPTConfig(vocab_size=53, hidden_size=32, num_hidden_layers=3, "
    "num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=32))",
    "bloom": "C.BloomForCausalLM(C.BloomConfig(vocab_size=53, hidden_size=32, n_layer=3, "
    "n_head=4))",
    "llama": "C.LlamaForCausalLM(C.LlamaConfig(**LM))",
    "mistral": "C.MistralForCausalLM(C.MistralConfig(**GROUPED))",
    "mixtral": "C.MixtralForCausalLM(C.MixtralConfig(num_local_experts=4, **GROUPED))",
    "qwen2": "C.Qwen2ForCausalLM(C.Qwen2Config(**GROUPED))",
    "qwen3": "C.Qwen3ForCausalLM(C.Qwen3Config(head_dim=8, **GROUPED))",
    "qwen3_moe": "C.Qwen3MoeForCausalLM(C.Qwen3MoeConfig(head_dim=8, num_experts=4, "
    "num_experts_per_tok=2, moe_intermediate_size=16, **GROUPED))",
    "phi": "C.PhiForCausalLM(C.PhiConfig(**LM))",
    "phi3": "C.Phi3ForCausalLM(C.Phi3Config(pad_token_id=0, bos_token_id=0, eos_token_id=0, **LM))",
    "gemma": "C.GemmaForCausalLM(C.GemmaConfig(head_dim=8, **GROUPED))",
    "gemma2": "C.Gemma2ForCausalLM(C.Gemma2Config(head_dim=8, **GROUPED))",
    "gpt_oss": "C.GptOssForCausalLM(C.GptOssConfig(head_dim=8, num_local_experts=4, "
    "num_experts_per_tok=2, **GROUPED))",
    "mamba": "C.MambaForCausalLM(C.MambaConfig(vocab_size=53, hidden_size=32, "
    "num_hidden_layers=3))",
    "t5": "C.T5ForConditionalGeneration(C.T5Config(vocab_size=53, d_model=32, d_kv=8, d_ff=64, "
    "num_layers=3, num_heads=4, decoder_start_token_id=0))",
    "bart": "C.BartForConditionalGeneration(C.BartConfig(max_position_embeddings=32, **TINY))",
    "bert": "C.BertForMaskedLM(C.BertConfig(**LM))",
    "bert_classifier": "C.BertForSequenceClassification(C.BertConfig(**LM))",
    "distilbert": "C.DistilBertForMaskedLM(C.DistilBertConfig(vocab_size=53, dim=32, n_layers=3, "
    "n_heads=4, hidden_dim=64))",
    "roberta": "C.RobertaForMaskedLM(C.RobertaConfig(**LM))",
    "albert": "C.AlbertForMaskedLM(C.AlbertConfig(vocab_size=53, embedding_size=16, **S))",
    "deberta": "C.DebertaV2ForMaskedLM(C.DebertaV2Config(**LM))",
    "electra": "C.ElectraForMaskedLM(C.ElectraConfig(embedding_size=16, **LM))",
    "vit": "C.ViTForImageClassification(C.ViTConfig(**IMAGE, **S))",
    "clip": "C.CLIPModel(C.CLIPConfig(text_config=dict(bos_token_id=0, eos_token_id=2, **LM), "
    "vision_config=dict(**IMAGE, **S), projection_dim=16))",
    "swin": "C.SwinForImageClassification(C.SwinConfig(image_size=32, patch_size=2, embed_dim=16, "
    "depths=[2, 2], num_heads=[2, 4], window_size=4))",
    "resnet": "C.ResNetForImageClassification(C.ResNetConfig(embedding_size=8, "
    "hidden_sizes=[8, 16], depths=[2, 2], layer_type='basic'))",
    "convnext": "C.ConvNextForImageClassification(C.ConvNextConfig(hidden_sizes=[8, 16], "
    "depths=[2, 2], num_stages=2))",
    "whisper": "C.WhisperForConditionalGeneration(C.WhisperConfig(num_mel_bins=8, "
    "max_source_positions=10, max_target_positions=16, **TINY))",
    "wav2vec2": "C.Wav2Vec2ForCTC(C.Wav2Vec2Config(vocab_size=53, conv_dim=(16, 16), "
    "conv_stride=(2, 2), conv_kernel=(3, 3), num_conv_pos_embeddings=4, "
    "num_conv_pos_embedding_groups=2, apply_spec_augment=False, **S))",
}

_IDS = "torch.randint(3, 53, (96, 12), generator=g)"
_IMAGES = "torch.randn(96, 3, 32, 32, generator=g, dtype=torch.float64)"
INPUTS = {
    "t5": {"input_ids": _IDS, "decoder_input_ids": _IDS},
    "bart": {"input_ids": _IDS, "decoder_input_ids": _IDS},
    "whisper": {
        "input_features": "torch.randn(96, 8, 20, generator=g, dtype=torch.float64)",
        "decoder_input_ids": _IDS,
    },
    "wav2vec2": {"input_values": "torch.randn(96, 400, generator=g, dtype=torch.float64)"},
    **{family: {"pixel_values": _IMAGES} for family in ("vit", "swin", "convnext")},
}

NO_DROPOUT = """
if hasattr(model, "set_experts_implementation"):
    model.set_experts_implementation("eager")  # the grouped one knows no float64
for part in [model.config, *model.modules()]:
    for name, value in vars(part).items():
        if "drop" in name and isinstance(value, float):
            setattr(part, name, 0.0)
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
"""
CELL = "loss = model(**batch).logits.double().pow(2).mean()\n"


def model_of(family: str) -> str:
    """Return code that binds a model of a family as ``model``."""
    return f"{SIZES}torch.manual_seed(1)\nmodel = {FAMILIES[family]}\n"


def program_of(family: str) -> str:
    """Return code that binds a model in float64, an optimizer and ``data``."""
    inputs = INPUTS.get(family, {"input_ids": _IDS})
    columns = ", ".join(f"{name!r}: {code}" for name, code in inputs.items())
    return (
        f"{model_of(family)}{NO_DROPOUT}"
        "model.double().train()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "g = torch.Generator().manual_seed(2)\n"
        f"columns = {{{columns}}}\n"
        "data = [{name: column[i] for name, column in columns.items()} for i in range(96)]\n"
    )
