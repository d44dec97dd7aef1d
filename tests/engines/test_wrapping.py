"""The rules of ``--wrap``: what becomes a unit, and that training stays that of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import programs
import pytest
import torch
from equality import (
    GPT2,
    GPT2_CELL,
    PLAIN,
    PLAIN_CELL,
    Case,
    Trajectory,
    assert_equal,
    on_engines,
    single_process,
)
from families import CELL, FAMILIES, model_of, program_of
from loops import check_losses, check_weights, in_one_process, norm_of
from programs import Program
from test_lora import CELL as LORA_CELL
from test_lora import built as lora
from torch import nn

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.engine.parallel.unit_dtypes import of_one_dtype
from fsdp_magic.engine.parallel.wrapping import left_notes, units_of, wrap


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def names(model: nn.Module, rule: str) -> list[str]:
    """Return the dotted names of the units of a rule."""
    by_id = {id(part): name for name, part in model.named_modules()}
    return [by_id[id(part)] for (part,) in units_of(model, rule)]


def fsdp1(model: nn.Module, least: int) -> set[str]:
    """Return what torch's own rule wraps, in the words of ``_recursive_wrap``."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as policy

    wrapped: set[str] = set()

    def recurse(module: nn.Module, name: str) -> int:
        size = sum(p.numel() for p in module.parameters())
        if not policy(module, True, size, min_num_params=least):
            return 0
        taken = sum(recurse(child, f"{name}.{n}") for n, child in module.named_children())
        if policy(module, False, size - taken, min_num_params=least):
            wrapped.add(name[1:])
            return size
        return taken

    recurse(model, "")
    return wrapped - {""}


# ---------------------------------------------------------------- which modules


def test_blocks_are_the_repeated_children() -> None:
    assert names(Net(), "blocks") == ["blocks.0", "blocks.1"]
    assert names(Net(), "none") == []


@pytest.mark.parametrize("least", [1, 80, 81, 270, 300, 560, 576, 592, 1200, 10_000])
def test_size_is_the_rule_of_min_num_params(least: int) -> None:
    assert set(names(Net(), f"size:{least}")) == fsdp1(Net(), least)


@pytest.mark.parametrize("least", [1, 100, 200, 1000])
def test_size_takes_layers_of_torch_apart_only_where_they_call_their_parts(least: int) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    # its fast path reads the weights of linears, norms and attention by itself
    assert set(names(model, f"size:{least}")) <= {"layers.0", "layers.1"}


def test_classes_name_units_also_those_of_their_base_class() -> None:
    class Special(Mlp):
        pass

    model = Net()
    model.blocks[1].mlp = Special()
    assert names(model, "Mlp") == ["blocks.0.mlp", "blocks.1.mlp"]
    assert names(model, "Special") == ["blocks.1.mlp"]
    assert names(model, "Block,Mlp") == ["blocks.0.mlp", "blocks.0", "blocks.1.mlp", "blocks.1"]


def test_units_come_after_those_inside_them() -> None:
    order = names(Net(), "size:1")
    for outer in order:
        inside = [name for name in order if name.startswith(f"{outer}.")]
        assert all(order.index(name) < order.index(outer) for name in inside)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("Blok", r"has no module of class Blok; did you mean Block\? It has Net, Block, Mlp"),
        ("Block,Tower", r"no module of class Tower; it has Net, Block"),
        ("block", r"did you mean (blocks|Block)\?"),
        ("blocks,Mlp", r"blocks is a rule of its own and cannot stand beside class names; give "),
        ("ModuleList", r"never called; name the class of what is in them: Net, Block"),
    ],
)
def test_a_class_that_no_unit_can_be_of_is_refused(rule: str, message: str) -> None:
    with pytest.raises(FsdpError, match=message) as caught:
        units_of(Net(), rule)
    assert "\n" not in str(caught.value)


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_layers_without_parts_are_blocks_where_a_model_repeats_nothing_else() -> None:
    assert names(Layers(4), "blocks") == ["layers.0", "layers.1", "layers.2"]
    model = Net()
    model.extra = Layers(4)
    assert names(model, "blocks") == ["blocks.0", "blocks.1"]


def test_a_large_model_that_is_gathered_at_once_is_said_to_be() -> None:
    once = "all of it is gathered at once"
    large = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 8))
    (note,) = left_notes("model", wrap(large, "blocks"))
    assert note.startswith(f"model: the model has no repeated blocks, so {once}; --wrap size:1M")
    (note,) = left_notes("model", wrap(Net(), "Net"))
    assert f"--wrap Net is the class of the model itself, so {once}; name a" in note
    assert note.endswith(": Block, Mlp, Linear, Embedding, LayerNorm"), note
    for model, rule in (
        (large, "none"),
        (large, "Linear"),
        (Net(), "blocks"),
        (Layers(600), "blocks"),
    ):
        assert left_notes("model", wrap(model, rule)) == []


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp() for _ in range(3)])
        self.last = Mlp()

    def forward(self, x, which):
        return self.last(self.experts[which](x))


@pytest.mark.parametrize("rule", ["blocks", "Mlp", "size:1", "size:100"])
def test_what_ranks_may_choose_stays_with_its_holder_under_every_rule(rule: str) -> None:
    assert not [name for name in names(Chooser(), rule) if name.startswith("experts")]
    assert wrap(Chooser(), rule).chosen == ("experts",)


class Reader(nn.Module):
    """Reads the weights of its parts, except for what says nothing of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called, self.inner = Mlp(), Mlp(), Mlp()

    def forward(self, x):
        x = x.to(self.called.up.weight.dtype)
        x = self.called(x) + self.inner(x)
        return x @ self.read.up.weight.T @ self.read.down.weight.T + self.inner.up.weight.sum()


def test_parts_whose_weights_are_read_are_no_units() -> None:
    assert names(Reader(), "Linear") == ["called.up", "called.down", "inner.down"]
    assert names(Reader(), "Mlp") == ["called"]


# ---------------------------------------------------------------- ties


def tied() -> Net:
    model = Net()
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize("rule", ["size:1", "Embedding,Linear", "Embedding,Block"])
def test_tied_weights_stay_with_what_holds_both(rule: str) -> None:
    assert not {"embed", "head"} & set(names(tied(), rule))
    assert any(name.startswith("blocks") for name in names(tied(), rule))


def test_a_tie_into_a_unit_takes_the_units_on_the_way() -> None:
    model = Net()
    model.head = nn.Linear(8, 32)
    model.head.weight = model.blocks[0].mlp.up.weight
    assert names(model, "Block,Mlp") == ["blocks.1.mlp", "blocks.1"]


def test_a_module_that_two_units_share_is_a_unit() -> None:
    model = Net()
    model.blocks[1].mlp = model.blocks[0].mlp
    assert names(model, "blocks") == ["blocks.0.mlp", "blocks.0", "blocks.1"]


# ---------------------------------------------------------------- dtypes (F30)


def split(model: nn.Module, rule: str) -> list[str]:
    by_id = {id(part): name for name, part in model.named_modules()}
    units = of_one_dtype(model, units_of(model, rule), name="model", whole=())
    return [by_id[id(part)] for (part,) in units]


def half(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a model in bf16, with modules of a class in fp32."""
    model.to(torch.bfloat16)
    for part in model.modules():
        if isinstance(part, kind):
            part.float()
    return model


def test_f30_norms_in_fp32_are_units_of_their_own() -> None:
    model = half(Net(), nn.LayerNorm)
    assert split(model, "blocks") == ["blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1"]
    assert split(model, "none") == ["blocks.0.norm", "blocks.1.norm"]


def test_f30_frozen_parameters_may_be_of_any_dtype() -> None:
    model = half(Net(), nn.LayerNorm)
    for block in model.blocks:
        block.norm.requires_grad_(False)
    assert split(model, "blocks") == ["blocks.0", "blocks.1"]


def test_f30_what_cannot_be_taken_apart_is_named_all_of_it() -> None:
    model = Net()
    model.blocks[0].mlp.up.bias.data = model.blocks[0].mlp.up.bias.data.double()
    model.head.weight.data = model.head.weight.data.double()
    model.head.weight_again = nn.Parameter(torch.ones(2))
    with pytest.raises(FsdpError) as caught:
        split(model, "blocks")
    message = str(caught.value)
    for name in ("blocks.0.mlp.up.weight (float32)", "blocks.0.mlp.up.bias (float64)"):
        assert name in message
    for name in ("head.weight (float64)", "head.weight_again (float32)"):
        assert name in message
    assert "blocks.1" not in message


# ---------------------------------------------------------------- equality


@cache
def reference(case: Case) -> Trajectory:
    return single_process(case)


TIED = Case(model=GPT2, cell=GPT2_CELL)


@pytest.mark.parametrize(
    ("strategy", "rule", "accumulate"),
    [
        ("full_shard", "size:1", 2),
        ("shard_grad_op", "size:3000", 1),
        ("full_shard", "GPT2Attention,GPT2Block", 1),
        ("full_shard", "none", 2),
    ],
)
def test_training_equals_one_process(session, strategy, rule, accumulate) -> None:
    measured = on_engines(session, TIED, strategy=strategy, wrap=rule, accumulate=accumulate)
    assert_equal(measured, reference(TIED), tolerance=1e-9)


def test_what_was_asked_for_can_be_read_from_the_placement(session) -> None:
    code = Case(model=PLAIN, dtype="float32").built
    options = {"precision": "bf16", "activation_checkpointing": "selective", "show": False}
    for strategy in ("full_shard", "ddp"):
        placed = session.model(code, strategy=strategy, **options)
        asked = (placed.precision, placed.activation_checkpointing, placed.compiled)
        assert asked == ("bf16", "selective", False)


def test_a_size_that_no_module_has_is_said(session) -> None:
    placed = session.model(Case(model=PLAIN).built, wrap="size:100M", show=False)
    assert len(placed.unit_bytes) == 1
    (note,) = [note for note in placed.notes if "100.0M" in note]
    assert note.startswith("no module of model has 100.0M parameters, so the whole model is one")
    assert "; model.blocks.0 has " in note
    smaller = session.model(Case(model=PLAIN).built, wrap="size:100", show=False)
    assert not any("parameters" in note for note in smaller.notes)


SCALED = PLAIN.replace("nn.LayerNorm(24)", "nn.LayerNorm(24), Scale()").replace(
    "def block", "class Scale(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.weight = nn.Parameter(torch.ones(24))\n"
    "    def forward(self, x):\n"
    "        return x * self.weight.double()\n\n"
    "def block",
)  # fmt: skip
SCALED += "for each in model.blocks:\n    each[3].float()\n"


def test_f30_a_model_of_two_trainable_dtypes_trains_as_in_one_process(session) -> None:
    case = Case(model=SCALED, cell=PLAIN_CELL)
    measured = on_engines(session, case)
    units = {p.unit for p in session.shards(show=False).parameters if p.dtype == "float32"}
    assert units == {f"blocks.{n}.3" for n in range(3)}
    assert_equal(measured, reference(case), tolerance=1e-6)  # float32 rounds their gradients


LORA = Program(built=lora("float64", "float64"), cell=LORA_CELL)


@cache
def lora_reference() -> Trajectory:
    return programs.in_one_process(LORA)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of peft, about transformers
@pytest.mark.parametrize(
    ("strategy", "rule", "dtypes"),
    [
        ("full_shard", "size:1", ("float64", "float64")),
        *(
            pytest.param(strategy, rule, dtypes, marks=pytest.mark.nightly)
            for strategy, rule in (
                ("full_shard", "size:1"),
                ("shard_grad_op", "size:5000"),
                ("full_shard", "GPT2Attention,GPT2Block"),
                ("shard_grad_op", "none"),
                ("hybrid_shard", "size:1"),
                ("hybrid_shard", "blocks"),
            )
            for dtypes in (("float64", "float64"), ("bfloat16", "float32"))
        ),
    ],
)
def test_f13_adapters_train_under_every_rule(session, strategy: str, rule: str, dtypes) -> None:
    size = 1 if strategy == "hybrid_shard" else None
    session.model(lora(*dtypes), strategy=strategy, wrap=rule, shard_size=size, show=False)
    measured = programs.trained(session, LORA)
    if dtypes == ("float64", "float64"):
        assert_equal(measured, lora_reference(), tolerance=1e-9)
    moved = {n for n, value in measured.after.items() if not torch.equal(value, measured.before[n])}
    assert moved == {name for name in measured.after if "lora" in name}
    for name, value in measured.after.items():
        assert str(value.dtype) == f"torch.{dtypes['lora' in name]}"


# ---------------------------------------------------------------- families of transformers

UNITS = {
    # encoder and decoder, or text and pictures
    **dict.fromkeys(("t5", "clip"), 6),
    **dict.fromkeys(("bart", "whisper"), 4),
    # stages
    **dict.fromkeys(("swin", "resnet", "convnext"), 2),
    # one layer that is called again and again: gathered once, with the root
    "albert": 0,
}
"""Blocks of a family; 3 of those that are not here."""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own configurations
@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_a_family_are_its_units(family: str) -> None:
    built: dict[str, Any] = {}
    exec(model_of(family), built)
    wrapping = wrap(built["model"], "blocks")
    assert len(wrapping.units) == UNITS.get(family, 3)
    assert not wrapping.chosen


EQUAL = (
    "gpt_neox", "opt", "bloom", "llama", "mixtral", "gpt_oss", "mamba", "t5", "bart", "bert",
    "distilbert", "albert", "deberta", "electra", "vit", "swin", "convnext", "whisper", "wav2vec2",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["blocks", "size:1", "size:2000"])
@pytest.mark.parametrize("family", EQUAL)
def test_a_family_trains_as_in_one_process(session, family: str, rule: str) -> None:
    program = program_of(family)

    def loop(built: dict[str, Any]) -> Any:
        model, optimizer, data = (built[name] for name in ("model", "optimizer", "data"))
        for step in range(3):
            samples = data[8 * step : 8 * (step + 1)]
            batch = {name: torch.stack([s[name] for s in samples]) for name in samples[0]}
            loss = model(**batch).logits.double().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            yield loss.item(), norm_of(*model.parameters())
            optimizer.step()

    losses, norms, before, after = in_one_process(program, loop)
    session.model(program, wrap=rule, show=False)
    run = session.train(CELL, data="data", steps=3, micro_batch_size=4, no_shuffle=True, show=False)
    check_losses(run.losses, losses, tolerance=1e-7)
    assert run.grad_norms == pytest.approx(norms, rel=1e-7)
    check_weights(session, before, after, tolerance=1e-7)
