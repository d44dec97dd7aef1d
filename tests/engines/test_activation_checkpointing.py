"""Activations computed again in backward: nothing differs but memory."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from equality import PLAIN, PLAIN_CELL, STEPS, Case, Trajectory, assert_equal, single_process
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import activation_checkpointing
from fsdp_magic.errors import CellFailedError

STRATEGIES = ("full_shard", "ddp")
"""All of them meet it in ``test_strategies``."""
MODELS = {"gpt2-tied": Case(), "plain": Case(model=PLAIN, cell=PLAIN_CELL)}


@cache
def reference(case: Case) -> Trajectory:
    return single_process(case)


def on_engines(
    session, case, kind, *, strategy="full_shard", accumulate=1, **options
) -> Trajectory:
    session.model(
        case.built, strategy=strategy, activation_checkpointing=kind, show=False, **options
    )
    trajectory = Trajectory(before=session.pull("dict(model.named_parameters())"))
    run = session.train(
        case.cell, data="data", steps=STEPS, no_shuffle=True, accumulate=accumulate,
        micro_batch_size=16 // session.world_size // accumulate, show=False,
    )  # fmt: skip
    trajectory.losses, trajectory.grad_norms = run.losses, run.grad_norms
    trajectory.after = session.pull("dict(model.named_parameters())")
    return trajectory


AXES = (["blocks", "selective"], STRATEGIES, MODELS, [1, 2])
EVERY_COMMIT = ("blocks", "full_shard", "gpt2-tied", 2), ("selective", "ddp", "plain", 1)
"""``test_strategies`` has any two of them together, and with all else."""


@pytest.mark.parametrize(
    ("kind", "strategy", "model", "accumulate"),
    [
        pytest.param(*case, marks=() if case in EVERY_COMMIT else pytest.mark.nightly)
        for case in product(*AXES)
    ],
)
def test_training_equals_one_process(session, kind, strategy, model, accumulate):
    case = MODELS[model]
    measured = on_engines(session, case, kind, strategy=strategy, accumulate=accumulate)
    assert_equal(measured, reference(case), tolerance=1e-9)
    counted = session.pull("[*model.state_dict(), *dict(model.named_modules())]")
    names = {}
    exec(case.built, names)
    plain = names["model"]
    assert counted == [*plain.state_dict(), *dict(plain.named_modules())]
    kinds = session.pull("[kind.__name__ for kind in type(model).__mro__]")
    assert type(plain).__name__ in kinds


LOW = {"precision": "bf16", "accumulate": 2}
LOW_EVERY_COMMIT = (
    ("full_shard", "blocks", "selective"),
    ("full_shard", "none", "blocks"),
    ("ddp", "none", "selective"),
)


@pytest.mark.parametrize(
    ("strategy", "wrap", "kind"),
    [
        pytest.param(*case, marks=() if case in LOW_EVERY_COMMIT else pytest.mark.nightly)
        for case in product(
            ["full_shard", "shard_grad_op", "ddp", "zero1"],
            ["blocks", "none", "size:2_000"],
            ["blocks", "selective"],
        )
    ],
)
def test_nothing_is_cast_otherwise_when_it_is_computed_again(session, strategy, wrap, kind):
    case = Case(dtype="float32")
    with_, without = (
        on_engines(session, case, each, strategy=strategy, wrap=wrap, **LOW)
        for each in (kind, False)
    )
    assert with_.losses == without.losses
    assert_equal(with_, without, tolerance=1e-5)


DRAWN = """
import torch
import torch.nn as nn
torch.manual_seed(1)
forwards = []

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x):
        forwards.append(torch.is_grad_enabled())
        trip()
        return x + self.layers(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def trip():
    again = torch._C._current_graph_task_id() != -1
    if armed == (again, rank) and step == 3:
        raise ERROR("failed")

armed = None
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = list(torch.randn(64, 8, dtype=torch.float64))

def left():
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in model.parameters()]
    return [t.detach().clone() for t in (*parts, *model.buffers())]
"""
DRAWN_CELL = "loss = model(batch).pow(2).mean()\n"


def drawn(session, kind, *, steps=6, code=DRAWN):
    code = code.replace("ERROR", "RuntimeError")
    session.model(code, activation_checkpointing=kind, show=False)
    return session.train(DRAWN_CELL, data="data", steps=steps, micro_batch_size=4, show=False)


def start_again(session) -> None:
    session.run(
        "from fsdp_magic.engine.randomness import TrainingRandomness\n"
        "engine = __import__('builtins')._fsdp_magic_call.__self__\n"
        "engine._randomness = TrainingRandomness(engine.world.request.seed, rank)",
        show=False,
    )


@pytest.mark.parametrize("kind", ["blocks", "selective"])
def test_draws_and_running_statistics_are_those_without_it(session, kind):
    plain = drawn(session, False)
    expected = session.pull("left()", rank="all")
    assert session.pull("len(forwards)") == 3 * 6
    start_again(session)
    again = drawn(session, kind)
    assert again.losses == plain.losses
    assert again.grad_norms == plain.grad_norms
    left = session.pull("left()", rank="all")
    assert all(torch.equal(a, b) for m, n in zip(left, expected) for a, b in zip(m, n))
    assert session.pull("len(forwards)") == 2 * 3 * 6  # each block once more in backward
    session.run(
        "forwards.clear()\nwith torch.no_grad():\n    model.eval()(data[0][None])", show=False
    )
    assert session.pull("forwards") == [False] * 3


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("kind", "error"), [("blocks", "KeyboardInterrupt"), ("selective", "RuntimeError")]
)
def test_a_failure_in_either_forward_leaves_no_trace(session, kind, error, again):
    plain = drawn(session, kind)
    expected = session.pull("left()", rank="all")
    start_again(session)
    session.run("del model, optimizer", show=False)
    code = DRAWN.replace("armed = None", f"armed = ({again}, 1)")
    code = code.replace("ERROR", error)
    with pytest.raises((CellFailedError, KeyboardInterrupt)) as caught:
        drawn(session, kind, code=code)
    session.run("armed = None", show=False)
    rest = session.train(DRAWN_CELL, data="data", steps=3, micro_batch_size=4, show=False)
    assert caught.value.run.losses + rest.losses == plain.losses
    left = session.pull("left()", rank="all")
    assert all(torch.equal(a, b) for m, n in zip(left, expected) for a, b in zip(m, n))


CACHE = "cache"
"""Its name in transformers 5.24; before, ``past_key_values``."""
CACHING = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(1)
config = GPT2Config(
    n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=16,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)
model = GPT2LMHeadModel(config).double().train()
ids = torch.randint(0, 20, (2, 8))
"""


def names_of(code: str) -> dict:
    names: dict = {}
    exec(code, names)
    return names


def gradients(model) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["blocks", "selective"])
def test_caches_of_decoders_are_right(kind):
    names = names_of(CACHING)
    model, ids = names["model"], names["ids"]
    with torch.no_grad():
        given = model(ids[:, :3], use_cache=True)[CACHE]

    def losses():
        import copy

        yield model(ids, labels=ids).loss
        yield model(ids, labels=ids, use_cache=True).loss
        # a cache that holds something is part of what is computed
        yield model(ids[:, 3:], **{CACHE: copy.deepcopy(given)}).logits.pow(2).mean()

    def all_gradients():
        for loss in losses():
            loss.backward()
            yield gradients(model)

    expected = list(all_gradients())
    activation_checkpointing.apply(model, [], ModelSpec(activation_checkpointing=kind))
    assert CACHE not in model(ids)
    for found, wanted in zip(all_gradients(), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
    assert model.config.use_cache is True
    with torch.no_grad():
        assert CACHE in model(ids)
    plain = names_of(CACHING)["model"].eval().generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=4, do_sample=False), plain)


def test_blocks_that_checkpoint_themselves_are_left_to_it():
    model = names_of(CACHING)["model"]
    enable = "activation_checkpointing_enable"  # transformers 5.24; before, gradient_
    getattr(model, enable, model.gradient_checkpointing_enable)()
    notes = activation_checkpointing.apply(model, [], ModelSpec(activation_checkpointing="blocks"))
    assert notes == ["2 blocks checkpoint themselves already, and are left to it"]
    assert all("forward" not in vars(block) for block in model.transformer.h)


def test_a_model_without_blocks_is_told():
    notes = activation_checkpointing.apply(
        torch.nn.Linear(2, 2), [], ModelSpec(activation_checkpointing="blocks")
    )
    assert "no repeated blocks" in notes[0]


BLOCKS = 16
"""So many that what a backward takes for a moment, which is seen or not, is little beside them."""
DEEP = """
import gc
import torch
import torch.nn as nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())

    def forward(self, x):
        return x + self.layers(x)

model = optimizer = None
gc.collect()  # the model of an earlier cell
model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = list(torch.randn(4096, 64))
""".replace("BLOCKS", str(BLOCKS))


def test_it_keeps_less_in_memory(session):
    """Each block keeps 640 numbers a sample; checkpointed it keeps 64, and one at a time all."""
    peaks = {}
    for kind in (False, "selective", "blocks"):
        session.model(DEEP, activation_checkpointing=kind, show=False)
        before = session.status(show=False)[0].allocated_bytes
        run = session.train(DRAWN_CELL, data="data", steps=2, micro_batch_size=1024, show=False)
        peaks[kind] = run.ranks[0].peak_memory.allocated_bytes - before
    assert peaks["blocks"] < peaks["selective"] < peaks[False]
    kept, fewer = BLOCKS * 640, BLOCKS * 64 + 640
    assert peaks[False] - peaks["blocks"] > 0.8 * (kept - fewer) * 1024 * 4


class Products(TorchDispatchMode):
    """Counts matrix products of linear layers; those of their own backward are others."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "again"), [(False, 0), ("selective", BLOCKS), ("blocks", 2 * BLOCKS)]
)
def test_as_many_products_are_computed_again_as_are_not_kept(kind, again):
    model = names_of(DEEP)["model"]
    activation_checkpointing.apply(model, [], ModelSpec(activation_checkpointing=kind))
    loss = model(torch.ones(2, 64)).sum()
    with Products() as products:
        loss.backward()
    assert products.count == again
