"""``--cpu-offload`` and ``--sync-batchnorm`` on CPU engines, and what they do to tensors."""

from __future__ import annotations

import pytest
import torch
from equality import PLAIN, PLAIN_CELL, Case, assert_equal, on_engines, single_process
from torch import nn

from fsdp_magic.engine import gradients
from fsdp_magic.engine.parallel.sync_batchnorm import convert
from fsdp_magic.errors import FsdpError


def test_offloading_on_cpu_engines_says_that_it_has_no_effect(session, capsys) -> None:
    case = Case(model=PLAIN, cell=PLAIN_CELL, max_grad_norm=0.3)
    measured = on_engines(session, case, cpu_offload=True)
    assert_equal(measured, single_process(case), tolerance=1e-9)
    assert session.shards(show=False).notes == (
        "--cpu-offload has no effect on CPU engines: shards are in host memory already",
    )


@pytest.mark.parametrize(("sync", "is_there"), [("every", True), ("last", False)])
def test_gradients_are_reduced_when_it_was_asked_for(session, sync: str, is_there: bool) -> None:
    """Where they are reduced at every micro-step, shards have gradients from the first one on."""
    case = Case(model=PLAIN, cell=PLAIN_CELL)
    session.model(case.built, accumulate_sync=sync, show=False)
    session.run("seen, shards = [], [p for p in model.parameters() if p.ndim]", show=False)
    seeing = "if micro_step:\n    seen.append(any(p.grad is not None for p in shards))\n"
    session.train(seeing + case.cell, data="data", steps=2, accumulate=2, show=False)
    assert session.pull("seen", rank="all") == [[is_there] * 2] * 2


def test_batchnorm_over_ranks_is_refused_on_cpu_engines_before_anything_changes(session) -> None:
    with pytest.raises(FsdpError, match=r"--sync-batchnorm needs GPUs.*micro-batch") as caught:
        session.model(Case(model=PLAIN).built, sync_batchnorm=True, show=False)
    assert "\n" not in str(caught.value)
    assert session.pull("type(model).__name__, type(model.first.weight).__name__") == (
        "Net",
        "Parameter",
    )


def test_batchnorm_layers_stay_the_same_objects() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return x

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Own(2), nn.InstanceNorm1d(2))
    layer, weight, mean = model[1], model[1].weight, model[1].running_mean
    assert convert(model) == ["2"]
    assert model[1] is layer
    assert isinstance(layer, nn.SyncBatchNorm)
    assert layer.weight is weight
    assert layer.running_mean is mean
    assert type(model[2]) is Own
    x = torch.randn(4, 2)
    expected = nn.BatchNorm1d(2).eval()(x)
    torch.testing.assert_close(layer.eval()(x), expected)


def test_a_converted_layer_has_what_torch_gives_its_own() -> None:
    ours, theirs = nn.BatchNorm2d(3), nn.SyncBatchNorm(3)
    convert(nn.Sequential(ours))
    assert vars(ours).keys() == vars(theirs).keys()


def test_gradients_of_two_kinds_are_measured_and_scaled_together() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    square = gradients.square_of(parameters, world_size=2)
    assert square.dtype == torch.float32
    assert square.item() == (3 + 4) * 4 / 2
    gradients.scale(parameters, torch.tensor(0.5, dtype=torch.float64))
    assert [p.grad.unique().item() for p in parameters] == [1.0, 1.0]
    assert [p.grad.dtype for p in parameters] == [torch.float32, torch.bfloat16]
    for parameter in parameters:
        parameter.grad = None
    assert gradients.square_of(parameters, world_size=2).item() == 0.0
