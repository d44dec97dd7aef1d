"""--meta: built without memory, initialised by the model's own rules, buffers right."""

from __future__ import annotations

import pytest
import torch

from fsdp_magic.errors import CellFailedError

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=301, initializer_range=0.05,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
OWN = """
import torch
import torch.nn as nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
    def forward(self, x):
        return x + self.norm(self.first(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 24, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(7) * 2, persistent=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        EXTRA
    def forward(self, x):
        x = self.embed(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x) * self.scale
    RULE

data = list(torch.randint(0, 30, (40,)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kinds = {p.device.type for p in model.parameters()}
"""
EVERYTHING = "import fsdp_magic.engine.parallel.meta as file\nfile.SMALL_BYTES = SIZE"


@pytest.fixture
def whole(session):
    """Engines on which every parameter counts as a large one."""
    session.run(EVERYTHING.replace("SIZE", "0"), show=False)
    yield session
    session.run(EVERYTHING.replace("SIZE", "1 << 20"), show=False)


def own(extra: str = "", rule: str = "") -> str:
    return OWN.replace("EXTRA", extra).replace("RULE", rule)


@pytest.mark.parametrize(
    "strategy",
    ["full_shard", *(pytest.param(s, marks=pytest.mark.nightly) for s in ("ddp", "zero1"))],
)
def test_torch_modules_are_initialised_as_if_built_for_real(whole, strategy) -> None:
    whole.model(own(), meta=True, strategy=strategy, show=False)
    assert whole.pull("kinds") == {"meta", "cpu"}  # the scalar is real
    got = whole.pull("dict(model.named_parameters())", rank="all")
    for name, tensor in got[0].items():
        assert torch.equal(tensor, got[1][name]), name
        assert torch.isfinite(tensor).all(), name
    weights = got[0]
    bound = 1 / 24**0.5  # Linear's rule
    assert 0.9 * bound < weights["blocks.1.first.weight"].abs().max() <= bound
    assert not torch.equal(weights["blocks.0.first.weight"], weights["blocks.1.first.weight"])
    assert torch.equal(weights["blocks.0.norm.weight"], torch.ones(24))
    assert torch.equal(weights["embed.weight"][3], torch.zeros(24))
    assert 0.8 < weights["embed.weight"].std() < 1.2
    assert weights["scale"] == 2.0
    assert whole.pull("model.positions").tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert whole.pull("model.head.weight is model.embed.weight")
    run = whole.train(
        "loss = model(batch).pow(2).mean()", data="data", steps=3, micro_batch_size=2, show=False
    )
    assert len(set(run.losses)) == 3  # the optimizer of the cell trains it


@pytest.mark.nightly
def test_rules_of_transformers_and_buffers_that_no_file_holds(whole) -> None:
    whole.model(LLAMA, meta=True, show=False)
    got = whole.pull("dict(model.named_parameters())")
    for name, tensor in got.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert 0.04 < tensor.std() < 0.06, name
    names: dict[str, object] = {}
    exec(LLAMA, names)
    for name, buffer in names["model"].named_buffers():
        assert torch.equal(whole.pull(f"model.get_buffer({name!r})"), buffer), name


@pytest.mark.nightly
def test_a_persons_own_rule_is_used(whole) -> None:
    rule = "def _init_weights(self, module):\n        "
    rule += "if isinstance(module, nn.Linear): nn.init.constant_(module.weight, 0.25)"
    whole.model(own("self.apply(self._init_weights)", rule), meta=True, show=False)
    assert torch.equal(whole.pull("model.blocks[1].first.weight"), torch.full((24, 24), 0.25))


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ("self.table = nn.Parameter(torch.randn(5, 4))", "no rule initialises model.table; write"),
        (
            "nn.init.normal_(self.blocks[0].first.weight, std=0.01)",
            "the model's rules do not do again what the cell does to "
            "model.blocks.0.first.weight; write",
        ),
        ("self.blocks[0].first.weight.data *= 5", "do not do again .* model.blocks.0.first.weight"),
        (
            "self.blocks[0].first.weight = nn.Parameter(torch.full((24, 24), 5.0))",
            "do not do again what the cell does to model.blocks.0.first.weight; write",
        ),
        (
            "self.blocks[0].load_state_dict(Block().state_dict())\n        "
            "self.blocks[0].first.weight.data.copy_(torch.tensor(2.0))",
            "cannot be copied or loaded to model.blocks.0.first.weight, .*; do it in a later cell",
        ),
        (
            "nn.utils.parametrizations.spectral_norm(self.blocks[0].first)",
            "would fill buffers that have no memory: model.blocks.0.first.*; leave --meta, or",
        ),
    ],
)
def test_what_no_rule_initialises_is_named_and_nothing_is_sharded(whole, extra, error) -> None:
    with pytest.raises(CellFailedError, match=error) as caught:
        whole.model(own(extra), meta=True, show=False)
    assert len(str(caught.value).splitlines()) == 1
    assert whole.pull("type(model).__name__") == "Net"
    assert whole.pull("model.blocks[1].first.weight.is_meta")


@pytest.mark.parametrize(
    "line",
    [
        "float(model.blocks[0].first.weight.sum())",
        pytest.param("model.blocks[0].to('cpu')", marks=pytest.mark.nightly),
        pytest.param("model.blocks[0].first.weight.detach().tolist()", marks=pytest.mark.nightly),
    ],
)
def test_a_cell_that_reads_values_before_there_are_any_is_told_so(whole, line: str) -> None:
    with pytest.raises(CellFailedError, match="with --meta large parameters have no values before"):
        whole.model(own() + line, meta=True, show=False)


@pytest.mark.nightly
def test_weights_that_are_there_are_kept(whole) -> None:
    whole.run("import torch\nearlier = torch.nn.Linear(24, 24).weight", show=False)
    line = "self.blocks[0].first.weight = earlier"
    code = "import numpy as np\n" + own(line)
    whole.model(code, meta=True, show=False)
    kept = whole.pull("earlier")
    assert torch.equal(whole.pull("model.blocks[0].first.weight"), kept)


@pytest.mark.nightly
def test_small_parameters_are_as_the_constructor_made_them(session) -> None:
    extra = "self.table = nn.Parameter(torch.full((5, 4), 3.0))\n"
    extra += (
        "        self.wide = nn.Linear(512, 512)\n        nn.init.constant_(self.wide.bias, 3.0)"
    )
    session.model(own(extra), meta=True, show=False)
    assert session.pull("kinds") == {"cpu", "meta"}
    assert torch.equal(session.pull("model.table"), torch.full((5, 4), 3.0))
    # the rule that gives the weight beside it its values writes the bias as well
    assert torch.equal(session.pull("model.wide.bias"), torch.full((512,), 3.0))
    assert session.pull("model.wide.weight").std() > 0


@pytest.mark.nightly
def test_rules_that_look_into_parts_are_used(whole) -> None:
    code = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=8, n_head=2, n_embd=64, vocab_size=101, n_positions=32)
model = GPT2LMHeadModel(config)
"""
    whole.model(code, meta=True, show=False)
    scaled = whole.pull("model.transformer.h[3].mlp.c_proj.weight").std()
    assert 0.9 < scaled / (0.02 / 16**0.5) < 1.1  # GPT-2 scales it by the depth
    assert 0.9 < whole.pull("model.transformer.h[3].mlp.c_fc.weight").std() / 0.02 < 1.1
