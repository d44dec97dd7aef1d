"""bf16 and fp16 mean one thing under every strategy: what one process computes in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coverings import pairwise
from low_precision import DTYPES, SECOND_ORDER, built, cell, gradients, loss_in, roundings

STRATEGIES = ("full_shard", "shard_grad_op", "ddp", "zero1")
GLOBAL_BATCH, LR, FACTOR = 16, 0.125, 0.125
SCALES = {"bf16": 1.0, "fp16": 2.0**16}


@pairwise(precision=DTYPES, strategy=STRATEGIES, accumulate=[1, 4], engines=[2, 4])
def test_a_gradient_is_that_of_one_process_in_the_same_precision(
    world, precision, strategy, accumulate, engines
):
    session, dtype = world(engines), DTYPES[precision]
    parts = engines * accumulate
    session.model(built(lr=LR), strategy=strategy, precision=precision, show=False)
    before = session.pull("dict(model.named_parameters())")
    run = session.train(
        cell(FACTOR), data="data", steps=1, no_shuffle=True, accumulate=accumulate,
        micro_batch_size=GLOBAL_BATCH // parts, show=False,
    )  # fmt: skip
    names: dict[str, Any] = {}
    exec(built(), names)
    size = GLOBAL_BATCH // parts
    cut = [slice(n * size, (n + 1) * size) for n in range(parts)]
    options = {"factor": FACTOR, "scale": SCALES[precision]}
    (whole,) = gradients(names, dtype, [slice(0, GLOBAL_BATCH)], **options)
    of_parts = list(gradients(names, dtype, cut, **options))
    unit = torch.finfo(dtype).eps / 2
    for name, after in session.pull("dict(model.named_parameters())").items():
        assert after.dtype == torch.float32
        ours = (before[name] - after) / LR  # exact but for fp32: no momentum
        bound = (
            roundings(name)
            * unit
            * (sum(each[name].abs() for each in of_parts) + whole[name].abs())
        )
        bound = bound * SECOND_ORDER + 4 * torch.finfo(torch.float32).eps * before[name].abs() / LR
        off = (ours - whole[name]).abs()
        assert (off <= bound).all(), f"{name} is off by {(off / bound).max():.3g} bounds"
    loss = loss_in(names, dtype, slice(0, GLOBAL_BATCH), FACTOR).item()
    assert run.losses[0] == pytest.approx(loss, rel=1e-6)  # of outputs that are fp32


WHAT_IS_SEEN = """
import torch
import torch.nn as nn
torch.manual_seed(1)
seen = {}

def look(name, *tensors):
    seen[name] = [str(t.dtype).removeprefix("torch.") for t in tensors]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        look("conv", x, self.conv.weight, self.scale)
        x = self.norm(self.conv(x))
        look("after the norm", x)
        return x * self.scale

class Norm(nn.BatchNorm2d):
    def forward(self, x):
        look("norm", x, self.weight, self.running_mean)
        return super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].norm = Norm(3)
        self.last = nn.Linear(3, 2)

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)) + mask)

    def head(self, x):
        look("head", self.last.weight)
        return self.last(x)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.randn(3, 4, 4) for _ in range(16)]
"""
SEEING = """
out = model(batch, mask=torch.ones(3))
look("out", out)
loss = out.pow(2).mean()
metrics = {"loss": loss}
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_computes_in_which_type(session, strategy):
    notes = session.model(WHAT_IS_SEEN, strategy=strategy, precision="bf16", show=False).notes
    assert any("2 layers with running statistics" in note for note in notes)
    session.train(SEEING, data="data", steps=2, micro_batch_size=4, show=False)
    low, full = "bfloat16", "float32"
    expected = {
        "conv": [low, low, full], "norm": [full] * 3, "after the norm": [low], "head": [low],
        "out": [full],
    }  # fmt: skip
    assert session.pull("seen", rank="all") == [expected] * 2
    session.run("seen.clear()", show=False)
    session.eval(SEEING, data="data", micro_batch_size=4, show=False)  # in the same precision
    assert session.pull("seen", rank="all") == [expected] * 2
    assert session.pull("sorted({str(t.dtype) for t in (*model.parameters(), optimizer.param_groups"
                        "[0]['params'][0])})") == ["torch.float32"]  # fmt: skip
    assert session.pull("model.blocks[1].norm.running_mean.abs().sum().item() > 0")
    session.run("head = model.head(torch.ones(1, 3))\nlook('called', head)", show=False)
    assert session.pull("seen['called'], seen['head']") == ([full], [low])


def test_layers_with_running_statistics_equal_one_process_in_fp32(session):
    """F18: the norm of a bf16 model is exactly the norm of an fp32 one, given the same input."""
    session.model(WHAT_IS_SEEN, precision="bf16", show=False)
    session.run(
        "plain = nn.BatchNorm2d(3)\n"
        "x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(3)).bfloat16()\n"
        "ours = model.blocks[0].norm(x)\n"
        "theirs = plain(x.float()).bfloat16()\n",
        show=False,
    )
    assert session.pull("torch.equal(ours, theirs)", rank="all") == [True, True]
    assert session.pull("torch.equal(model.blocks[0].norm.running_var, plain.running_var)")


def test_reading_whole_parameters_does_not_round_them(session):
    session.model(built(), precision="bf16", show=False)
    before = session.pull("dict(model.named_parameters())")
    session.run("with fsdp.unsharded(model):\n    s = model.last.weight.sum()", show=False)
    after = session.pull("dict(model.named_parameters())")
    assert all(torch.equal(before[name], after[name]) for name in before)
    session.run(
        "with fsdp.unsharded(model), torch.no_grad():\n    model.last.weight[0, 0] = 5.0",
        show=False,
    )
    written = session.pull("dict(model.named_parameters())")
    before["last.weight"][0, 0] = 5.0
    assert all(torch.equal(before[name], written[name]) for name in before)


def test_a_model_of_another_type_keeps_it(session):
    code = (
        built()
        .replace("model = Net()", "model = Net().double()")
        .replace("optimizer", "model.blocks[0].requires_grad_(False).bfloat16()\noptimizer")
    )
    session.model(code, precision="bf16", show=False)
    session.train(cell(), data="data", steps=2, micro_batch_size=4, show=False)
    types = session.pull("{n: str(p.dtype) for n, p in model.named_parameters()}")
    assert {t for n, t in types.items() if n.startswith("blocks.0")} == {"torch.bfloat16"}
    assert {t for n, t in types.items() if not n.startswith("blocks.0")} == {"torch.float64"}


def test_a_card_without_bf16_is_told_to_take_fp16(session):
    session.run(
        "from types import SimpleNamespace\n"
        "from fsdp_magic.engine.parallel import precision\n"
        "from fsdp_magic.core.specs import ModelSpec\n"
        "cuda = torch.cuda.is_bf16_supported, torch.cuda.get_device_name\n"
        "torch.cuda.is_bf16_supported = lambda including_emulation: including_emulation\n"
        "torch.cuda.get_device_name = lambda device: 'Tesla T4'\n"
        "said = ''\n"
        "try:\n"
        "    precision.refuse_unfit(\n"
        "        ModelSpec(precision='bf16'), SimpleNamespace(device=torch.device('cuda', 0)))\n"
        "except Exception as error:\n"
        "    said = str(error)\n"
        "torch.cuda.is_bf16_supported, torch.cuda.get_device_name = cuda\n".replace(
            "from types", "import torch\nfrom types", 1
        ),
        show=False,
    )
    assert session.pull("said") == (
        "Tesla T4 does not compute in bf16 (cards since Ampere do); type --precision fp16"
    )


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_gradients_are_added_up_in_fp32(session, strategy):
    """The sum of two bf16 numbers seldom is one; summed in bf16 all of them would be."""
    code = built() + (
        "fine = []\n"
        "def look(*_):\n"
        "    gradients = [p.grad for p in model.parameters()]\n"
        "    gradients = [g.to_local() if hasattr(g, 'to_local') else g for g in gradients]\n"
        "    fine.append(any((g != g.bfloat16()).any().item() for g in gradients))\n"
        "optimizer.register_step_pre_hook(look)\n"
    )
    session.model(code, strategy=strategy, precision="bf16", show=False)
    session.train(cell(), data="data", steps=1, micro_batch_size=8, show=False)
    assert session.pull("fine", rank="all") == [[True], [True]]
