"""What a constructor does to a weight without memory is what rules do to a real one, or is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.init import orthogonal_

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.parallel.writes import Writes, WritesMode


def built(write: Callable[[nn.Linear], object]) -> Writes | None:
    """Return what was done to a weight on the meta device."""
    with WritesMode() as mode, torch.device("meta"):
        linear = nn.Linear(6, 4)
        write(linear)
    return mode.of(linear.weight)


def again(rule: Callable[[nn.Linear], object]) -> Writes | None:
    """Return what was done to a real weight, after its own rule."""
    linear = nn.Linear(6, 4)
    with WritesMode() as mode, torch.no_grad():
        mode.begin(linear.weight)
        linear.reset_parameters()
        rule(linear)
    return mode.of(linear.weight)


def nothing(linear: nn.Linear) -> None:
    """Leave it."""


def another(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.full((4, 6), 5.0))


def other_content(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data * 5


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "data.normal_": lambda m: m.weight.data.normal_(0, 5),
    "data.fill_": lambda m: m.weight.data.fill_(5),
    "data.mul_": lambda m: m.weight.data.mul_(5),
    "rows": lambda m: m.weight.data[:2].zero_(),
    "other rows": lambda m: m.weight.data[2:].zero_(),
    "copy_": lambda m: m.weight.detach().copy_(torch.eye(4, 6)),
    "orthogonal_": lambda m: orthogonal_(m.weight, gain=100),
    "sparse_": lambda m: nn.init.sparse_(m.weight, 0.5, std=5.0),
    "trunc_normal_": lambda m: nn.init.trunc_normal_(m.weight, std=5.0),
    "xavier_normal_": lambda m: nn.init.xavier_normal_(m.weight),
    "eye_": lambda m: nn.init.eye_(m.weight),
    "another parameter": another,
    "other content": other_content,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen_whatever_it_goes_through(name: str) -> None:
    assert built(nothing) == again(nothing)
    assert built(WRITES[name]) != again(nothing)
    assert built(WRITES[name]) == again(WRITES[name])


def test_different_writes_differ() -> None:
    seen = [built(write) for write in WRITES.values() if write is not another]
    assert len(set(seen)) == len(seen)
    assert built(another) == built(WRITES["data.fill_"])
    assert built(lambda m: nn.init.orthogonal_(m.weight)) != built(WRITES["orthogonal_"])


def test_what_was_overwritten_does_not_count() -> None:
    def twice(linear: nn.Linear) -> None:
        WRITES["data.mul_"](linear)
        nn.init.ones_(linear.weight)

    assert built(twice) == again(lambda m: m.weight.fill_(1))
    assert built(lambda m: setattr(m, "weight", nn.Parameter(torch.ones(4, 6)))) == built(twice)


def test_what_was_made_elsewhere_is_not_known() -> None:
    before = torch.empty(3)
    with WritesMode() as mode:
        before.mul_(2.0)
        copy = before.clone()
        read = torch.tensor([1.0, 2.0])
    assert mode.of(before) is mode.of(copy) is mode.of(read) is None


def test_tensors_like_one_without_memory_can_be_made() -> None:
    with WritesMode():
        like = torch.empty(4, 6, device="meta")
        assert torch.zeros_like(like, device="cpu").tolist() == [[0.0] * 6] * 4
        assert like.new_tensor(2.0, device="cpu").item() == 2.0
        assert nn.functional.embedding(torch.tensor([1]), like).is_meta


def test_functions_of_torch_are_its_own_afterwards() -> None:
    genuine = nn.init.orthogonal_
    with WritesMode():
        assert nn.init.orthogonal_ is not genuine
        assert globals()["orthogonal_"] is not genuine
    assert nn.init.orthogonal_ is globals()["orthogonal_"] is genuine


READS: list[Callable[[torch.Tensor], object]] = [
    lambda t: float(t.sum()),
    lambda t: bool(t.isnan().any()),
    torch.Tensor.tolist,
    lambda t: t.to("cpu"),
    lambda t: torch.zeros(4, 6).copy_(t),
    lambda t: nn.functional.linear(torch.ones(2, 6), t),  # torch itself gives garbage
]


@pytest.mark.parametrize("read", READS)
def test_values_that_are_not_there_cannot_be_read(read: Callable[[torch.Tensor], object]) -> None:
    with (
        WritesMode(),
        pytest.raises(FsdpError, match="no values before the cell is over") as caught,
    ):
        read(torch.empty(4, 6, device="meta"))
    assert "\n" not in str(caught.value)
