"""TRACER: the batch and the loss of models of transformers, where the cell says none.

They follow the model's own forward: what it takes, and labels as the loss of its head wants them.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_magic.core.errors import FsdpError

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""What configs call the most tokens of a sample. Source: configs of transformers 5.24."""
_CHOICES = 2
"""Answers to choose from; a model does not say how many."""
_WRITE_BATCH = (
    "add a function that makes one: def example_batch(b): return "
    "{'x': torch.zeros(b, 3, 224, 224), 'y': torch.zeros(b, dtype=torch.long)}"
)
WRITE_LOSS = (
    "add a function: def loss_fn(model, batch): return "
    "torch.nn.functional.cross_entropy(model(batch['x']), batch['y'])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultBatch:
    """A batch that the planner makes.

    Attributes:
        make: samples -> batch.
        note: a sentence that says what is in it.
    """

    make: Callable[[int], dict[str, torch.Tensor]]
    note: str


def transformer_of(model: nn.Module) -> nn.Module | None:
    """Return the model of transformers that a model is, or is an adapter around; None: neither."""
    module: Any = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return None
    adapted: Any = model
    inner = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
    return inner if isinstance(inner, module.PreTrainedModel) else None


def default_batch(model: nn.Module, sequence_length: int | None) -> DefaultBatch:
    """Return what stands for a batch of a model.

    Args:
        model: the cell's.
        sequence_length: tokens of a sample; None: the most that its config says.

    Raises:
        FsdpError: if nothing is known of what it takes; it says what to write.
    """
    inner = transformer_of(model)
    if inner is None:
        raise FsdpError(f"nothing says what a batch of {_name(model)} is; {_WRITE_BATCH}")
    takes = inspect.signature(inner.forward).parameters
    if "input_ids" in takes and getattr(inner, "main_input_name", "input_ids") == "input_ids":
        return _of_text(inner, takes, sequence_length)
    if "pixel_values" in takes and hasattr(inner.config, "image_size"):
        return _of_images(inner, takes)
    raise FsdpError(f"nothing is known of what {_name(inner)} takes; {_WRITE_BATCH}")


def _of_text(model: Any, takes: Any, sequence_length: int | None) -> DefaultBatch:
    length = sequence_length or _longest(model.config)
    names = ["input_ids"]
    if not _is_causal(model) and "attention_mask" in takes:
        names.append("attention_mask")
    if "token_type_ids" in takes and getattr(model.config, "type_vocab_size", None):
        names.append("token_type_ids")

    def make(b: int) -> dict[str, torch.Tensor]:
        shape = (b, _CHOICES, length) if _is_multiple_choice(model) else (b, length)
        batch = {name: torch.ones(shape, dtype=torch.long) for name in names}
        return {**batch, **_labels(model, takes, b, length)}

    said = (
        "" if sequence_length else f", the most that {_name(model)} takes; --seq-len says another"
    )
    if sequence_length and sequence_length > (longest := _longest_known(model.config)):
        said = f", more than the {longest:,} that {_name(model)} is made for"
    labels = _labels(model, takes, 1, 1)
    what = ", ".join((*names, *labels))
    return DefaultBatch(make=make, note=f"each sample has {length:,} tokens{said} ({what})")


def _of_images(model: Any, takes: Any) -> DefaultBatch:
    config = model.config
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(config, "num_channels", 3)

    def make(b: int) -> dict[str, torch.Tensor]:
        pixels = torch.zeros(b, channels, height, width)
        return {"pixel_values": pixels, **_labels(model, takes, b, 1)}

    note = f"each sample is an image of {channels} x {height} x {width}"
    return DefaultBatch(make=make, note=note)


def _labels(model: Any, takes: Any, b: int, length: int) -> dict[str, torch.Tensor]:
    """Return the labels that the loss of a model's head wants; nothing: it has no loss."""
    config, head = model.config, _name(model)
    if "start_positions" in takes:
        return {name: torch.zeros(b, dtype=torch.long) for name in _SPAN if name in takes}
    if "labels" not in takes:
        return {}
    if not head.endswith(("Classification", "MultipleChoice", "NextSentencePrediction")):
        return {"labels": torch.zeros(b, length, dtype=torch.long)}
    if head.endswith("ForTokenClassification"):
        return {"labels": torch.zeros(b, length, dtype=torch.long)}
    if config.problem_type == "multi_label_classification":
        return {"labels": torch.zeros(b, config.num_labels)}
    if config.num_labels == 1 or config.problem_type == "regression":
        return {"labels": torch.zeros(b)}
    return {"labels": torch.zeros(b, dtype=torch.long)}


_SPAN = ("start_positions", "end_positions")


def _longest_known(config: Any) -> float:
    """Return the most tokens that a config says; infinity: it does not."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lengths = (getattr(text, name, None) for name in _LENGTHS)
    return next((n for n in lengths if isinstance(n, int) and 0 < n < 2**31), math.inf)


def _longest(config: Any) -> int:
    longest = _longest_known(config)
    if longest < math.inf:
        return int(longest)
    raise FsdpError(
        f"{type(config).__name__} does not say how many tokens a sample has; add --seq-len L"
    )


def _is_causal(model: Any) -> bool:
    is_decoder = not getattr(model.config, "is_encoder_decoder", False)
    return is_decoder and _name(model).endswith(("ForCausalLM", "LMHeadModel"))


def _is_multiple_choice(model: Any) -> bool:
    return _name(model).endswith(("ForMultipleChoice", "DoubleHeadsModel"))


def _name(model: nn.Module) -> str:
    return type(model).__name__
