"""Operators that a trace takes as CUDA would, and what it says of single ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.planning.step_trace import Allocated, Freed, Reached, Size, StepTrace
from fsdp_magic.engine.planning.cuda_kernels import cuda_kernels
from fsdp_magic.engine.planning.fake_mode import PlanningMode
from fsdp_magic.engine.planning.operations import Operations
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.tracing import trace_step
from tests.traced_model import NO_OPTIMIZER

FLASH = "aten::_scaled_dot_product_flash_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator with its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, Any] = {}
        self.operations = Operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] = args
        out = func(*args, **(kwargs or {}))
        self.operations.count(func, args, kwargs or {}, out)
        return out


def seen(work: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Return the operators that something takes on CUDA, and what it gives."""
    with PlanningMode(), _Seen() as mode, cuda_kernels():
        out = work()
    return mode.calls, out


def heads(
    *, size: int = 16, keys: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(2, n, 8, size, dtype=dtype) for n in (4, keys, keys))


# ---------------------------------------------------------------- CUDA's choices


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.float32, False, EFFICIENT),
        (torch.bfloat16, False, FLASH),
        (torch.bfloat16, True, EFFICIENT),
    ],
)
def test_attention_takes_cudas_kernels(dtype: torch.dtype, masked: bool, kernel: str) -> None:
    mask = torch.ones(8, 8, dtype=torch.bool) if masked else None
    calls, out = seen(lambda: F.scaled_dot_product_attention(*heads(dtype=dtype), attn_mask=mask))
    assert {name for name in calls if "attention" in name} == {kernel}
    assert out.shape == (2, 4, 8, 16)
    if masked:
        bias = calls[kernel][3]
        assert (bias.dtype, bias.shape) == (dtype, (2, 4, 8, 8))


def test_heads_are_padded_and_repeated_where_a_kernel_wants_it() -> None:
    calls, out = seen(lambda: F.scaled_dot_product_attention(*heads(size=6, keys=2)))
    assert [tuple(t.shape) for t in calls[EFFICIENT][:3]] == [(2, 4, 8, 8)] * 3
    assert out.shape[-1] == 6
    low = heads(keys=2, dtype=torch.bfloat16)
    calls, _ = seen(lambda: F.scaled_dot_product_attention(*low, enable_gqa=True))
    assert calls[FLASH][1].shape[1] == 2
    calls, _ = seen(lambda: F.scaled_dot_product_attention(*heads(size=264)))
    assert not {FLASH, EFFICIENT} & set(calls)


def test_dropout_takes_cudas_kernel() -> None:
    x = torch.empty(4, 8)
    assert "aten::native_dropout" in seen(lambda: F.dropout(x, 0.1))[0]
    assert "aten::native_dropout" not in seen(lambda: F.dropout(x, 0.1, training=False))[0]


def test_autocast_computes_in_fp32_what_cuda_does() -> None:
    def work() -> list[torch.dtype]:
        x = torch.empty(4, 4)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            product = x @ x
            return [product.dtype, product.pow(2).dtype, torch.exp(product).dtype]

    assert seen(work)[1] == [torch.bfloat16, torch.float32, torch.float32]


def test_bytes_moved_are_those_read_and_written_and_none_of_views() -> None:
    x = torch.ones(4, 8)
    with _Seen() as mode:
        x.view(8, 4).t() + 1
    assert mode.operations.moved == 2 * 4 * 32


# ---------------------------------------------------------------- single operators in a trace


def traced(
    model: nn.Module,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    *shape: int,
    variant: TraceVariant = TraceVariant(),  # noqa: B008
    trained: set[int] | None = None,
    is_cuda: bool = False,
) -> StepTrace:
    """Trace a model of fake parameters on samples of a shape."""
    program = Program(
        model=model,
        batch_of=lambda b: torch.zeros(b, *shape),
        loss_of=lambda batch: loss(model, batch),
        is_cuda=is_cuda,
    )
    return trace_step(program, variant=variant, optimizer=NO_OPTIMIZER, trained=trained)


def backward_of(trace: StepTrace) -> Counter[str]:
    """Return how often each operator took memory for a moment."""
    taken = (e for e in trace.micro_step if isinstance(e, Allocated))
    return Counter(e.operator for e in taken if e.kind == "temporary")


def test_a_norm_keeps_one_number_a_row_on_cuda() -> None:
    with PlanningMode():
        model = nn.Sequential(nn.Linear(4, 64), nn.RMSNorm(64))
        trace = traced(model, lambda model, batch: model(batch).sum(), 4, is_cuda=True)
    taken = [e for e in trace.micro_step if isinstance(e, Allocated)]
    kept = [e.size for e in taken if e.place == "1" and e.kind == "activation"]
    assert sorted(kept) == [Size(0, 4), Size(0, 64 * 4)]
    # the gradient that the sum has spread, and those of the norm's input and weight
    moments = sum(e.size.at(2) for e in taken if e.operator == "aten::empty_like")
    assert moments == 2 * 2 * 64 * 4 + 64 * 4


def test_gradients_that_meet_are_added_in_place_unless_somebody_holds_one() -> None:
    def alone(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch)
        return (x.sin() + x.cos()).sum()

    def held(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch)
        y, z = x.clone(), x.clone()  # the same gradient goes to both
        return (y + z).sin().sum()

    with PlanningMode():
        model = nn.Linear(4, 4)
        assert backward_of(traced(model, alone, 4))["aten::add"] == 0
        assert backward_of(traced(model, held, 4))["aten::add"] == 1


def test_what_is_computed_again_is_an_activation() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(lambda x: model(x).tanh(), batch, use_reentrant=False)
        return again.sum()

    with PlanningMode():
        trace = traced(nn.Linear(4, 4), loss, 4)
    backward = trace.micro_step[trace.micro_step.index(Reached("backward")) :]
    taken = {e.operator: e.kind for e in backward if isinstance(e, Allocated)}
    assert taken["aten::addmm"] == "activation"
    assert taken["aten::tanh_backward"] == "temporary"


def test_indexing_adds_to_its_zeros_in_place() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch)
        rows: torch.Tensor = x[torch.arange(len(batch))]
        return rows.sin().sum()

    with PlanningMode():
        taken = backward_of(traced(nn.Linear(4, 4), loss, 4))
    assert not {"aten::index_put", "aten::_index_put_impl"} & set(taken)


def test_convolutions_of_many_channels_copy_what_they_read() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().sum()

    def forward_moments(channels: int) -> list[float]:
        with PlanningMode():
            trace = traced(nn.Conv2d(channels, 8, 1, bias=False), loss, channels, 2, 2)
        return [
            event.size.at(1)
            for event, following in zip(trace.micro_step, trace.micro_step[1:], strict=False)
            if isinstance(event, Allocated)
            and event.operator == "aten::convolution"
            and isinstance(following, Freed)
            and following.id == event.id
        ]

    assert forward_moments(16) == [4 * (16 * 4 + 8 * 16 + 8 * 4)]
    assert forward_moments(3) == [4 * 8 * 4]


class _Parts(nn.Module):
    """Parameters of every sort, and buffers of which two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.zeros(5))
        self.register_buffer("again", self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.other(self.cut(x)) * self.scale * self.frozen)
        return y.square().sum()


def test_parameters_are_told_by_what_becomes_of_them() -> None:
    with PlanningMode():
        model = _Parts()
        held = {id(p) for name, p in model.named_parameters() if name != "other.weight"}
        trace = traced(
            model,
            lambda model, batch: model(batch),
            4,
            variant=TraceVariant("bf16"),
            trained=held,
        )
        again = traced(model, lambda model, batch: model(batch), 4)
    told = {name: (p.compute_bytes, p.trained, p.whole) for name, p in trace.parameters.items()}
    assert told == {
        "cut.weight": (2, True, False),
        "other.weight": (2, False, False),
        "scale": (4, True, True),
        "frozen": (2, False, False),
        "norm.weight": (4, True, True),
        "norm.bias": (4, True, True),
    }
    assert sum(held.size.fixed for held in trace.standing) == 4 * 5 + 4 * 4 + 4 * 4 + 8
    # afterwards the model computes as it did before
    kinds = Counter(e.kind for e in again.micro_step if isinstance(e, Allocated))
    assert not kinds["gathered"]
    assert math.prod(trace.parameters["cut.weight"].shape) == 16
