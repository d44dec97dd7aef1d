"""Batches of a session's own data, of other sizes: their samples and tokens repeated."""

from __future__ import annotations

import torch

from fsdp_magic.engine.planning.session import _resized

BATCH = {
    "input_ids": torch.arange(8).view(2, 4),
    "labels": torch.arange(2),
    "scale": torch.ones(()),
}


def test_samples_and_tokens_are_repeated_or_left_out() -> None:
    more = _resized(BATCH, 2, 3, tokens=6)
    assert more["input_ids"].tolist() == [
        *([0, 1, 2, 3, 0, 1], [4, 5, 6, 7, 4, 5], [0, 1, 2, 3, 0, 1]),
    ]
    assert more["labels"].tolist() == [0, 1, 0]
    assert more["scale"].shape == ()
    fewer = _resized(BATCH, 2, 1, tokens=None)
    assert fewer["input_ids"].tolist() == [[0, 1, 2, 3]]


def test_tokens_are_those_of_batches_that_say_their_ids() -> None:
    pixels = _resized((torch.ones(2, 4), torch.ones(2)), 2, 5, tokens=9)
    assert [tuple(t.shape) for t in pixels] == [(5, 4), (5,)]
