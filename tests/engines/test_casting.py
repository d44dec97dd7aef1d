"""Low-precision copies in the places of whole parameters, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from low_precision import built
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import activation_checkpointing, compiling, precision
from fsdp_magic.engine.parallel.casting import compute_in

LOW = torch.bfloat16
SPEC = ModelSpec(precision="bf16", strategy="ddp")


def net() -> Any:
    names: dict[str, Any] = {}
    exec(built(), names)
    return names["model"]


def spread(model: nn.Module, *, units: tuple[nn.Module, ...] = (), spec: ModelSpec = SPEC) -> Any:
    """Do to a model what spreading it does before and around a strategy of whole parameters."""
    wrapped = [(unit,) for unit in units]
    activation_checkpointing.apply(model, wrapped, spec)
    compiling.apply(model, wrapped, spec)
    precision.cast_inputs(model, spec)
    compute_in(model, wrapped, LOW)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def reference(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what plain torch computes with copies of the parameters, and its gradients."""
    plain = net()
    low = {name: p.to(LOW) for name, p in plain.named_parameters()}
    out = functional_call(plain, low | {"shift": plain.shift.to(LOW)}, (x.to(LOW),)).float()
    out.pow(2).sum().backward()
    return out.detach(), gradients(plain)


def check_like_plain_torch(model: Any) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    out = model(x)
    assert out.dtype == torch.float32
    out.pow(2).sum().backward()
    expected, wanted = reference(model, x)
    assert torch.equal(out, expected)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("units", ["blocks", "none"])
def test_it_computes_what_plain_torch_computes_with_copies(units, checkpointing):
    model = net()
    spec = ModelSpec(precision="bf16", strategy="ddp", activation_checkpointing=checkpointing)
    before = dict(model.named_parameters())
    spread(model, units=tuple(model.blocks) if units == "blocks" else (), spec=spec)
    for _ in range(2):
        check_like_plain_torch(model)
    assert all(before[name] is p for name, p in model.named_parameters())
    assert type(model).__name__ == "Net"
    assert model.state_dict().keys() == net().state_dict().keys()


def test_places_are_put_back_when_a_forward_raises():
    class Failing(nn.Linear):
        def forward(self, x):
            assert self.weight.dtype == LOW
            raise self.error

    for error in (ValueError("no"), KeyboardInterrupt()):
        model = net()
        model.blocks[1].down = Failing(48, 24)
        model.blocks[1].down.error = error
        spread(model, units=tuple(model.blocks))
        before = dict(model.named_parameters())
        with pytest.raises(type(error)):
            model(torch.ones(1, 10))
        assert all(before[name] is p for name, p in model.named_parameters())
        model.blocks[1].down = net().blocks[1].down
        with pytest.raises(RuntimeError, match="dtype"):  # a new part has not been spread
            model(torch.ones(1, 10))


def test_a_parameter_in_two_places_is_cast_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.seen = []

        def forward(self, ids):
            self.seen = [self.embed.weight, self.head.weight]
            return self.head(self.embed(ids))

    model = spread(Tied())
    model(torch.tensor([1, 2])).sum().backward()
    assert model.seen[0] is model.seen[1]
    assert model.seen[0].dtype == LOW
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.grad.dtype == torch.float32


def test_parts_methods_and_functions_compute_so_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 4)
            self.pair = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.cell = nn.LSTM(4, 4, batch_first=True)
            self.types = []

        def project(self, x):
            self.types.append(self.weight.dtype)
            return x @ self.weight

        def forward(self, x):
            x = checkpoint(self.pair, x, use_reentrant=False)
            x = torch.nn.functional.linear(x, self.inner.weight)  # of a part that is not called
            return self.cell(x[:, None])[0][:, 0]

    model = spread(Net())
    out = model.project(torch.ones(2, 4))
    assert (model.types, out.dtype) == ([LOW], torch.float32)
    assert model.inner(torch.ones(2, 4)).dtype == torch.float32
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in (model.inner.weight, *model.pair.parameters()))
    assert all(p.dtype == torch.float32 for p in model.cell._flat_weights)
    lost = functional_call(model, {"inner.weight": torch.zeros(4, 4)}, (torch.ones(2, 4),))
    assert lost.dtype == torch.float32


def test_a_deep_copy_computes_as_it_was_made():
    import copy

    model = spread(net(), units=())
    twin = copy.deepcopy(model)
    assert dict(twin.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for p in twin.parameters():
        p.data.zero_()
    check_like_plain_torch(model)


def test_nothing_keeps_a_model_alive():
    import gc
    import weakref

    model = spread(net())
    check_like_plain_torch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
