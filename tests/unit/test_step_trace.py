"""What a trace says is taken is what torch's allocator takes in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.planning.step_trace import (
    Allocated,
    Freed,
    Reached,
    StepTrace,
)
from fsdp_magic.engine.parallel.wrapping import units_of
from fsdp_magic.engine.planning.fake_mode import PlanningMode
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.tracing import trace_step
from fsdp_magic.engine.planning.variants import computing_as
from tests.traced_model import (
    IDS,
    NO_OPTIMIZER,
    SmallModel,
    allocated_peak,
    batch_of,
    program_of,
    some_or_nightly,
)


class _OneBlock(SmallModel):
    """The least that has everything."""

    def __init__(self) -> None:
        super().__init__(blocks=1)


class _TwoBlocks(SmallModel):
    """The least of which one block's activations are not all."""

    def __init__(self) -> None:
        super().__init__(blocks=2)


def _traced(build: Callable[[], nn.Module], variant: TraceVariant, **options: Any) -> StepTrace:
    with PlanningMode():
        return trace_step(program_of(build(), **options), variant=variant, optimizer=NO_OPTIMIZER)


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
                batch = batch_of(samples)
                logits = model(batch)
                loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
                loss.backward()
                del loss
                model.zero_grad()
    del logits
    return allocated_peak(profiler)


@some_or_nightly(
    ("precision", ("fp32", "bf16")),
    ("checkpointing", ("", "blocks", "selective")),
    ("samples", (3, 7)),
    default=(("bf16", "blocks", 7), ("fp32", "selective", 7)),
)
def test_a_trace_takes_what_the_allocator_gives(
    precision: str, checkpointing: str, samples: int
) -> None:
    """Peaks agree for batch sizes that were not traced."""
    variant = TraceVariant(precision, checkpointing)
    predicted = max(_levels(_traced(_TwoBlocks, variant), samples))
    # kernels on the CPU also take a few kilobytes that no operator returns
    assert predicted == pytest.approx(_measured_peak(_TwoBlocks, samples, variant), rel=0.015)


def test_gradients_of_one_tensor_add_up_in_place() -> None:
    """Autograd adds to the gradient that it holds; a dispatch mode would see a new one."""

    class _Twice(SmallModel):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.ids(ids)
            logits: torch.Tensor = self.head(x.sin() + x.cos())
            return logits

    events = _traced(_Twice, TraceVariant()).micro_step
    backward = events[events.index(Reached("backward")) :]
    of_x = IDS * 32 * 4  # the table's two gradients, one of them a view, are of another size
    taken = [e.operator for e in backward if isinstance(e, Allocated) and e.size.per_sample == of_x]
    assert "aten::mul" in taken
    assert "aten::add" not in taken


def test_a_batch_norm_makes_the_gradient_of_its_input_twice() -> None:
    """On the CPU, inside of the operator: what is made first is let go at once."""

    class _Normalised(SmallModel):
        def __init__(self) -> None:
            super().__init__(width=256, blocks=0)
            self.norm = nn.BatchNorm1d(IDS)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            of_channels: torch.Tensor = self.norm(self.ids(ids)).mean(-1, keepdim=True)
            return of_channels

    variant = TraceVariant()
    predicted = max(_levels(_traced(_Normalised, variant), 32))
    assert predicted == pytest.approx(_measured_peak(_Normalised, 32, variant), rel=0.015)


def test_nothing_is_left_but_what_variables_hold() -> None:
    """After a micro-step the batch and the logits are there, and are freed in the next."""
    trace = _traced(_OneBlock, TraceVariant())
    freed = {e.id for e in trace.micro_step if isinstance(e, Freed) and not e.carried}
    left = [e for e in trace.micro_step if isinstance(e, Allocated) and e.id not in freed]
    assert {e.kind for e in left} == {"input", "activation"}
    assert {e.id for e in left} == {
        e.id for e in trace.micro_step if isinstance(e, Freed) and e.carried
    }


def test_cuda_keeps_a_byte_an_element_for_dropout() -> None:
    """The CPU's mask has the dtype of its input."""

    class _Dropping(_OneBlock):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(F.dropout(self.ids(ids), 0.1))
            return logits

    masks = [
        event.size.per_sample
        for event in _traced(_Dropping, TraceVariant(), is_cuda=True).micro_step
        if isinstance(event, Allocated) and event.operator == "aten::native_dropout"
    ]
    assert sorted(masks) == [IDS * 32, IDS * 32 * 4]


def test_what_a_first_forward_keeps_stands_beside_the_step() -> None:
    """A table made once is counted once, and the passes after it are those that count."""

    class _Caching(_OneBlock):
        table: torch.Tensor | None = None

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.randn(IDS, 32)
            return super().forward(ids) * self.table.sum()

    trace = _traced(_Caching, TraceVariant())
    assert [(held.operator, held.size.fixed) for held in trace.standing] == [
        ("buffer", IDS * 32 * 4),
        ("aten::randn", IDS * 32 * 4),
    ]
    assert not any(
        isinstance(e, Allocated) and e.operator == "aten::randn" for e in trace.micro_step
    )


def test_a_cell_that_looks_at_the_batch_size_is_told_where() -> None:
    """The first operator that differs is named, with its module."""

    class _Choosing(_OneBlock):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(ids)
            return logits.tanh() if len(ids) > 2 else logits.sigmoid()

    with pytest.raises(FsdpError, match=r"aten::sigmoid with 2 samples, aten::tanh with 4"):
        _traced(_Choosing, TraceVariant())


def test_a_cell_that_reads_values_is_told_where() -> None:
    """A fake tensor has none."""

    class _Reading(_OneBlock):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(ids)
            return logits if logits.mean() > 0 else -logits

    with pytest.raises(FsdpError, match="depends on the values of a tensor"):
        _traced(_Reading, TraceVariant())


def test_known_values_are_read() -> None:
    """A mask of ones masks nothing, and positions follow each other."""

    class _Masked(_OneBlock):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(len(ids), IDS, dtype=torch.long)
            ahead = torch.arange(IDS).diff()
            assert bool(mask.all())
            assert bool((ahead == 1).all())
            assert not bool((torch.zeros_like(ids) > 0).any())
            return super().forward(ids)

    assert _traced(_Masked, TraceVariant()).micro_step


def test_similarities_of_all_pairs_grow_with_the_square() -> None:
    """A matrix of samples against samples."""

    class _Contrasting(_OneBlock):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            pooled = super().forward(ids).mean(1)
            return (pooled @ pooled.T).unsqueeze(1).expand(-1, IDS, -1)

    with PlanningMode():
        model = _Contrasting()
        program = Program(
            model=model, batch_of=batch_of, loss_of=lambda ids: model(ids).square().mean()
        )
        trace = trace_step(program, optimizer=NO_OPTIMIZER)
    pairs = [e for e in trace.micro_step if isinstance(e, Allocated) and e.size.per_pair]
    assert {e.size for e in pairs if e.operator == "aten::mm"} == {(0.0, 0.0, 4.0)}


def test_flops_are_those_of_the_products() -> None:
    """Two for each multiplication, and backward does twice what forward does."""
    width, blocks = 32, 1
    trace = _traced(_OneBlock, TraceVariant())
    products = IDS * (blocks * 12 * width * width + 500 * width)
    attention = blocks * 2 * IDS * IDS * width
    assert trace.flops.per_sample == 2 * (3 * products + 3.5 * attention)
