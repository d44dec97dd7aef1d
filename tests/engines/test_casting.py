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


BATCHNORM = """
import torch
from torch import nn
torch.manual_seed(3)
model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(16, 6, generator=generator), torch.randn(16, 2, generator=generator)
"""
USES = """
rows = slice(8 * rank, 8 * rank + 8)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
scaler.scale((model(inputs[rows]) - targets[rows]).pow(2).mean()).backward()
for p in (*model[0].parameters(), *model[2].parameters()):
    torch.distributed.all_reduce(p.grad)
    p.grad /= world_size
whole = [fsdp.whole(p.grad).clone() for p in model.parameters()]
scaler.unscale_(optimizer)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
torch._foreach_mul_([p.grad for p in model.parameters()], 2.0)
torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
after = [fsdp.whole(p.grad) for p in model.parameters()]
scaler.step(optimizer)
"""


def test_gradients_of_batchnorm_are_clipped_with_the_shards(session):
    """It stays whole in low precision, beside shards."""
    session.model(BATCHNORM, strategy="full_shard", precision="bf16", show=False)
    session.run(USES, show=False)
    whole, after = session.pull("whole"), session.pull("after")
    unscaled = [gradient / 64 for gradient in whole]
    norm = torch.stack([gradient.square().sum() for gradient in unscaled]).sum().sqrt()
    assert session.pull("float(norm)") == pytest.approx(float(norm), rel=1e-5)
    for ours, gradient in zip(after, unscaled, strict=True):
        expected = (gradient * 2 * 0.1 / norm).clamp(-0.05, 0.05)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)
