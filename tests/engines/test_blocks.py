"""Which modules become units: the repeated blocks that every rank calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_magic.engine.parallel.wrapping import units_of, wrap


def blocks(model: nn.Module) -> list[nn.Module]:
    return [part for (part,) in units_of(model, "blocks")]


def chosen_parts(model: nn.Module) -> list[str]:
    return list(wrap(model, "blocks").chosen)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


class Holder(nn.Module):
    """A model of one list of blocks, which each class below goes through in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.last = nn.Linear(2, 2)
        self.checkpointing = False
        self.skipped: list[int] = []


class Loop(Holder):
    def forward(self, x):
        for each in self.blocks:
            x = each(x)
        return self.last(x)


class Enumerated(Holder):
    def forward(self, x, targets=None):
        kept = []
        for i, each in enumerate(self.blocks[:-1]):
            if i not in self.skipped:
                x = each(x)
            if i == 1:
                kept.append(x)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
        if targets is None:
            return x
        return self.last(x)


class Checkpointed(Holder):
    def forward(self, x, use=False):
        for each in self.blocks:
            if self.checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(each, x)
            else:
                x = each(x)
            x = torch.utils.checkpoint.checkpoint(each, x) if use else each(x)
        return x


class Zipped(Holder):
    def forward(self, x, weights):
        mixed = [w * each(x) for each, w in zip(self.blocks, weights, strict=True)]
        return self.run(sum(mixed))

    def run(self, x):
        for each in reversed(self.blocks):
            x = each(x)
        return x


class Indexed(Holder):
    def forward(self, x, which):
        return self.blocks[which](x)


class Skipping(Holder):
    def forward(self, x):
        for each in self.blocks:
            if self.training and torch.rand(()) < 0.1:
                continue
            x = each(x)
        return x


class Early(Holder):
    def forward(self, x):
        for each in self.blocks:
            x = each(x)
            if x.sum() > 1:
                break
        return x


class Routed(Holder):
    def forward(self, x, router):
        for i in router(x).unique():
            x = x + self.blocks[i](x)
        return x


class Optional(Holder):
    def forward(self, x, image=None):
        return x if image is None else x + self.look(image)

    def look(self, image):
        for each in self.blocks:
            image = each(image)
        return image


class OptionalStatement(Holder):
    def forward(self, x, image=None):
        if image is not None:
            for each in self.blocks:
                x = x + each(image)
        return self.last(x)


class Filtered(Holder):
    def forward(self, x, keep):
        return sum(each(x) for i, each in enumerate(self.blocks) if keep[i])


class Passed(Holder):
    def forward(self, x, run):
        return run(self.blocks, x)


class Unseen(Holder):
    """Somebody else calls the blocks."""


class Recurrent(Holder):
    def forward(self, x):
        for t in range(x.shape[1]):
            x = self.blocks[0](x[:, t])
        return x


@pytest.mark.parametrize("kind", [Loop, Enumerated, Checkpointed, Zipped])
def test_blocks_that_forward_goes_through_are_units(kind):
    model = kind()
    assert blocks(model) == list(model.blocks)
    assert chosen_parts(model) == []


@pytest.mark.parametrize(
    "kind",
    [
        Indexed, Skipping, Early, Routed, Optional, OptionalStatement, Filtered, Passed, Unseen,
        Recurrent,
    ],
)  # fmt: skip
def test_blocks_that_ranks_may_choose_among_are_not(kind):
    model = kind()
    assert blocks(model) == []
    assert chosen_parts(model) == ["blocks"]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(block(), block())

    def forward(self, x):
        return self.layers(x)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.picture = Tower(), Tower()

    def forward(self, x, picture=None):
        x = self.text(x)
        if picture is not None:
            x = x + self.picture(picture)
        return x


def test_a_tower_that_a_rank_may_leave_out_has_no_units():
    model = TwoTowers()
    assert blocks(model) == list(model.text.layers)
    assert chosen_parts(model) == ["picture"]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([block(), block()]) for _ in range(2)])

    def forward(self, x):
        for stage in self.stages:
            for each in stage:
                x = each(x)
        return x


class NestedChoice(Nested):
    def forward(self, x, i):
        for stage in self.stages:
            x = stage[i](x)
        return x


def test_lists_in_lists_are_followed():
    assert len(blocks(Nested())) == 4
    assert blocks(NestedChoice()) == []


def test_a_library_goes_through_its_layers():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)
    assert blocks(model) == list(model.layers)


def test_a_class_without_source_has_no_units():
    names: dict = {"Holder": Holder}
    exec("class Made(Holder):\n    def forward(self, x):\n        return self.blocks[0](x)", names)
    assert blocks(names["Made"]()) == []
