"""GPT-2 as it was computed in 2022, operator by operator, because each one keeps its result.

Written from its mathematics: Radford et al., Language Models are Unsupervised Multitask Learners
(2019); the GELU is that of Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415, by tanh. Today's
implementations compute GELU and attention in one operator each, and so keep less.

What is of that time, and costs memory:

- The products of queries and keys are divided, masked and added to a padding mask, each a result
  of its own (transformers 4.18, ``GPT2Attention._attn``).
- GELU is a chain of eight elementwise operators (``NewGELUActivation``).
- The causal mask is a buffer of one byte for each pair of positions in each layer.
- The outputs are the loss, the logits and each layer's keys and values.
- The logits are shifted by a copy before the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, POSITIONS = 50257, 1024
DROPOUT = 0.1
MASKED = -1e4


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is: layers, width, heads."""

    layers: int
    width: int
    heads: int


LARGE, XL = Size(36, 1280, 20), Size(48, 1600, 25)
"""Source: table 2 of the paper for layers and width; heads are 64 wide."""


class Outputs(NamedTuple):
    """What a forward returns."""

    loss: Tensor
    logits: Tensor
    keys_and_values: tuple[tuple[Tensor, Tensor], ...]


class Projection(nn.Module):
    """A linear map whose weight is kept input by output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W + b``."""
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.width = size.heads, size.width
        self.c_attn = Projection(size.width, 3 * size.width)
        self.c_proj = Projection(size.width, size.width)
        ones = torch.ones(POSITIONS, POSITIONS, dtype=torch.uint8)
        self.register_buffer("causal", torch.tril(ones).view(1, 1, POSITIONS, POSITIONS))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what is attended to, and keys and values."""
        query, key, value = map(self._split, self.c_attn(x).split(self.width, dim=2))
        weights = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(value.shape[-1])
        length = query.shape[-2]
        causal = self.causal[:, :, :length, :length].bool()
        weights = torch.where(causal, weights, torch.tensor(MASKED, dtype=weights.dtype))
        weights = weights + padding
        weights = functional.softmax(weights, dim=-1).type(value.dtype)
        weights = functional.dropout(weights, DROPOUT, self.training)
        mixed = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous().view(x.shape)
        return functional.dropout(self.c_proj(mixed), DROPOUT, self.training), (key, value)


class FeedForward(nn.Module):
    """Two projections with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = Projection(width, 4 * width)
        self.c_proj = Projection(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projections of ``x``."""
        x = self.c_fc(x)
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        x = 0.5 * x * (1.0 + torch.tanh(inner))
        return functional.dropout(self.c_proj(x), DROPOUT, self.training)


class Block(nn.Module):
    """Attention and a feed-forward part, each added to what goes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = FeedForward(size.width)

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the block's output, and keys and values."""
        attended, kept = self.attn(self.ln_1(x), padding)
        x = attended + x
        return x + self.mlp(self.ln_2(x)), kept


class Transformer(nn.Module):
    """Embeddings and blocks."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, size.width)
        self.wpe = nn.Embedding(POSITIONS, size.width)
        self.h = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.ln_f = nn.LayerNorm(size.width)

    def forward(
        self, ids: Tensor, mask: Tensor
    ) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """Return the last hidden state, and keys and values of all layers."""
        positions = torch.arange(ids.shape[-1], dtype=torch.long)
        x = self.wte(ids) + self.wpe(positions.unsqueeze(0))
        x = functional.dropout(x, DROPOUT, self.training)
        padding = (1.0 - mask[:, None, None, :].to(self.wpe.weight.dtype)) * MASKED
        kept = []
        for block in self.h:
            x, keys_and_values = block(x, padding)
            kept.append(keys_and_values)
        return self.ln_f(x), tuple(kept)


class LanguageModel(nn.Module):
    """GPT-2 with its head.

    Args:
        size: how large it is.
        tied: whether the head's weight is that of the embedding of tokens.
    """

    def __init__(self, size: Size, *, tied: bool = True) -> None:
        super().__init__()
        self.transformer = Transformer(size)
        self.lm_head = nn.Linear(size.width, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Outputs:
        """Return the mean loss of the next tokens, and what it is made from."""
        x, kept = self.transformer(input_ids, attention_mask)
        logits = self.lm_head(x)
        shifted = logits[..., :-1, :].contiguous()
        wanted = labels[..., 1:].contiguous()
        loss = functional.cross_entropy(shifted.view(-1, VOCABULARY), wanted.view(-1))
        return Outputs(loss, logits, kept)
