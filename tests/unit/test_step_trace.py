"""What a trace says is taken is what torch's allocator takes in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Freed,
    OptimizerAllocated,
    OptimizerTrace,
    Reached,
    StepTrace,
)
from fsdp_magic.core.planning.strategies import ledger_of
from fsdp_magic.engine import optimizer_state
from fsdp_magic.engine.parallel.wrapping import units_of
from fsdp_magic.engine.planning.exact import exact_peak, fake_group, spec_of
from fsdp_magic.engine.planning.fake_mode import PlanningMode
from fsdp_magic.engine.planning.optimizer_trace import trace_optimizers
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.tracing import trace_step
from fsdp_magic.engine.planning.variants import computing_as

_NONE = OptimizerTrace(name="none", first=(), later=())
_IDS = 64


def _default_or_nightly(
    *axes: tuple[str, Collection[Any]], default: Collection[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Run a test on some cases, and on all by ``make nightly``."""
    names, values = zip(*axes, strict=True)
    cases = [
        pytest.param(*case, marks=() if case in default else pytest.mark.nightly)
        for case in product(*values)
    ]
    return pytest.mark.parametrize(",".join(names), cases)


class _Block(nn.Module):
    """Attention and a product, each around a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in self._projections()]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _projections(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


class _Model(nn.Module):
    """Blocks, whose table of ids is also their head."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.ids = nn.Embedding(500, width)
        self.register_buffer("places", torch.zeros(_IDS, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 500, bias=False)
        self.head.weight = self.ids.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.ids(ids) + self.places
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _program(model: nn.Module, *, is_cuda: bool = False) -> Program:
    """Return a program whose cell keeps its batch and its output, as variables are."""
    cell: dict[str, Any] = {}

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        cell["batch"] = batch
        cell["logits"] = model(batch)
        return F.cross_entropy(cell["logits"].flatten(0, 1), batch.flatten())

    return Program(model=model, batch_of=_batch, loss_of=loss_of, is_cuda=is_cuda)


def _batch(samples: int) -> torch.Tensor:
    return torch.zeros(samples, _IDS, dtype=torch.long)


def _traced(build: Callable[[], nn.Module], variant: TraceVariant, **options: Any) -> StepTrace:
    with PlanningMode():
        return trace_step(_program(build(), **options), variant=variant, optimizer=_NONE)


def _levels(trace: StepTrace, samples: int, *, micro_steps: int = 3) -> list[float]:
    """Return what is held after each event, if gradients are whole and dropped at the end."""
    level = sum(p.bytes for p in trace.parameters.values())
    level += sum(held.size.at(samples) for held in trace.standing)
    levels: list[float] = []
    before: dict[int, float] = {}
    for _ in range(micro_steps):
        live: dict[int, float] = {}
        gradients = 0
        for event in trace.micro_step:
            if isinstance(event, Allocated):
                live[event.id] = event.size.at(samples)
                level += live[event.id]
            elif isinstance(event, Freed):
                level -= before.pop(event.id, 0) if event.carried else live.pop(event.id)
            elif isinstance(event, Reached) and event.mark == "gradient":
                gradients += trace.parameters[event.name].bytes
                level += trace.parameters[event.name].bytes
            levels.append(level)
        level -= gradients
        before = live
    return levels


def _measured_peak(build: Callable[[], nn.Module], samples: int, variant: TraceVariant) -> int:
    """Return the most bytes that torch's allocator had given out in a plain loop."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build()
        logits: Any = None
        with computing_as(model, variant, units_of(model, "blocks")):
            for _ in range(3):
                batch = _batch(samples)
                logits = model(batch)
                loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
                loss.backward()
                del loss
                model.zero_grad()
    del logits
    return _peak(profiler)


def _peak(profiler: Any) -> int:
    found = profiler.profiler.kineto_results.events()
    events = sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())
    level = peak = 0
    for event in events:
        level += event.nbytes()
        peak = max(peak, level)
    return peak


@_default_or_nightly(
    ("precision", ("fp32", "bf16")),
    ("checkpointing", ("", "blocks", "selective")),
    ("samples", (3, 7)),
    default=(("fp32", "", 3), ("bf16", "blocks", 7), ("fp32", "selective", 7)),
)
def test_a_trace_takes_what_the_allocator_gives(
    precision: str, checkpointing: str, samples: int
) -> None:
    """Peaks agree for batch sizes that were not traced."""
    variant = TraceVariant(precision, checkpointing)
    predicted = max(_levels(_traced(_Model, variant), samples))
    # kernels on the CPU also take a few kilobytes that no operator returns
    assert predicted == pytest.approx(_measured_peak(_Model, samples, variant), rel=0.015)


def test_nothing_is_left_but_what_variables_hold() -> None:
    """After a micro-step the batch and the logits are there, and are freed in the next."""
    trace = _traced(_Model, TraceVariant())
    freed = {e.id for e in trace.micro_step if isinstance(e, Freed) and not e.carried}
    left = [e for e in trace.micro_step if isinstance(e, Allocated) and e.id not in freed]
    assert {e.kind for e in left} == {"input", "activation"}
    assert {e.id for e in left} == {
        e.id for e in trace.micro_step if isinstance(e, Freed) and e.carried
    }


def test_cuda_keeps_a_byte_an_element_for_dropout() -> None:
    """The CPU's mask has the dtype of its input."""

    class _Dropping(_Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(F.dropout(self.ids(ids), 0.1))
            return logits

    masks = [
        event.size.per_sample
        for event in _traced(_Dropping, TraceVariant(), is_cuda=True).micro_step
        if isinstance(event, Allocated) and event.operator == "aten::native_dropout"
    ]
    assert sorted(masks) == [_IDS * 32, _IDS * 32 * 4]


def test_what_a_first_forward_keeps_stands_beside_the_step() -> None:
    """A table made once is counted once, and the passes after it are those that count."""

    class _Caching(_Model):
        table: torch.Tensor | None = None

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.randn(_IDS, 32)
            return super().forward(ids) * self.table.sum()

    trace = _traced(_Caching, TraceVariant())
    assert [(held.operator, held.size.fixed) for held in trace.standing] == [
        ("buffer", _IDS * 32 * 4),
        ("aten::randn", _IDS * 32 * 4),
    ]
    assert not any(
        isinstance(e, Allocated) and e.operator == "aten::randn" for e in trace.micro_step
    )


def test_a_cell_that_looks_at_the_batch_size_is_told_where() -> None:
    """The first operator that differs is named, with its module."""

    class _Choosing(_Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(ids)
            return logits.tanh() if len(ids) > 2 else logits.sigmoid()

    with pytest.raises(FsdpError, match=r"aten::sigmoid with 2 samples, aten::tanh with 4"):
        _traced(_Choosing, TraceVariant())


def test_a_cell_that_reads_values_is_told_where() -> None:
    """A fake tensor has none."""

    class _Reading(_Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(ids)
            return logits if logits.mean() > 0 else -logits

    with pytest.raises(FsdpError, match="depends on the values of a tensor"):
        _traced(_Reading, TraceVariant())


def test_known_values_are_read() -> None:
    """A mask of ones masks nothing, and positions follow each other."""

    class _Masked(_Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(len(ids), _IDS, dtype=torch.long)
            ahead = torch.arange(_IDS).diff()
            assert bool(mask.all())
            assert bool((ahead == 1).all())
            assert not bool((torch.zeros_like(ids) > 0).any())
            return super().forward(ids)

    assert _traced(_Masked, TraceVariant()).micro_step


def test_similarities_of_all_pairs_grow_with_the_square() -> None:
    """A matrix of samples against samples."""

    class _Contrasting(_Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            pooled = super().forward(ids).mean(1)
            return (pooled @ pooled.T).unsqueeze(1).expand(-1, _IDS, -1)

    with PlanningMode():
        model = _Contrasting()
        program = Program(
            model=model, batch_of=_batch, loss_of=lambda ids: model(ids).square().mean()
        )
        trace = trace_step(program, optimizer=_NONE)
    pairs = [e for e in trace.micro_step if isinstance(e, Allocated) and e.size.per_pair]
    assert {e.size for e in pairs if e.operator == "aten::mm"} == {(0.0, 0.0, 4.0)}


def test_flops_are_those_of_the_products() -> None:
    """Two for each multiplication, and backward does twice what forward does."""
    width, blocks = 32, 3
    trace = _traced(lambda: _Model(width, blocks), TraceVariant())
    products = _IDS * (blocks * 12 * width * width + 500 * width)
    attention = blocks * 2 * _IDS * _IDS * width
    assert trace.flops.per_sample == 2 * (3 * products + 3.5 * attention)


# -- optimizers


class _Own(torch.optim.Optimizer):
    """One of a person's own, which makes its state from a shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["mean"] = state.get("mean", torch.zeros(p.shape)) * 0.9 + p.grad
            p -= 0.1 * state["mean"].sign()


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW (per parameter)": lambda p: torch.optim.AdamW(p),
    "AdamW (foreach)": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW (fused)": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam (per parameter)": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "SGD (per parameter)": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD (foreach)": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "RMSprop (per parameter)": lambda p: torch.optim.RMSprop(p, centered=True),
    "NAdam (per parameter)": lambda p: torch.optim.NAdam(p),
    "_Own": _Own,
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_takes_what_the_allocator_gives(name: str) -> None:
    """Peak and rest of a first step and of a later one, from stand-ins of other sizes."""
    model = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 100))
    optimizer = _OPTIMIZERS[name](model.parameters())
    trace = trace_optimizers([optimizer], {id(p): n for n, p in model.named_parameters()})
    assert trace.name == name
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    elements = {n: p.numel() for n, p in model.named_parameters()}
    assert _optimizer_peaks(trace, elements) == pytest.approx(
        _measured_optimizer_peaks(optimizer, model), abs=64
    )


def _optimizer_peaks(trace: OptimizerTrace, elements: dict[str, int]) -> list[float]:
    """Return the most that is held in a first and a later step, and what is left after each."""
    level, found, before = 0.0, [], {}
    for events in (trace.first, trace.later):
        peak, live = level, {}
        for event in events:
            if isinstance(event, OptimizerAllocated):
                size = event.fixed + event.per_element * elements.get(event.parameter, 0)
                live[event.id] = size
                level += size
                peak = max(peak, level)
            else:
                level -= before.pop(event.id, 0) if event.carried else live.pop(event.id)
        found += [peak, level]
        before |= live
    return found


def _measured_optimizer_peaks(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[int]:
    found, level = [], 0
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            optimizer_state.make_missing([optimizer])  # as the engine does
            optimizer.step()
        kept = sum(
            e.nbytes()
            for e in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
            if e.name() == "[memory]"
        )
        found += [level + _peak(profiler), level + kept]
        level += kept
    return found


# -- overlay and exact


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of units of a Linear
@_default_or_nightly(
    ("strategy", ("full_shard", "shard_grad_op")),
    ("variant", (TraceVariant(), TraceVariant("bf16"), TraceVariant("bf16", "blocks"))),
    ("wrap", ("blocks", "size:2000")),
    ("ranks", (2, 8, 64)),
    default=(
        ("full_shard", TraceVariant("bf16", "blocks"), "blocks", 8),
        ("shard_grad_op", TraceVariant(), "size:2000", 2),
    ),
)
def test_an_overlay_takes_what_fsdp2_takes(
    strategy: str, variant: TraceVariant, wrap: str, ranks: int
) -> None:
    """The overlay of a trace, and FSDP2's own code on as many ranks."""
    with fake_group(ranks) as mesh:
        exact = exact_peak(
            lambda: _program(_Model()), mesh, spec=spec_of(strategy, variant, wrap=wrap), samples=4
        )
    with PlanningMode():
        trace = trace_step(_program(_Model()), variant=variant, wraps=(wrap,), optimizer=_NONE)
    ledger = ledger_of(trace, Setting(strategy=strategy, world_size=ranks, wrap=wrap))  # type: ignore[arg-type]
    assert ledger.peak(4) == pytest.approx(exact, rel=0.015)
