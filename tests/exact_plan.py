"""The same figures as an overlay's, from FSDP2's own code on a group that sends nothing.

Slow, and only for strategies on FSDP2, but nothing in it is a model of FSDP2: units are made by
``fully_shard`` over a fake process group of any size, and what it gathers, frees and reduces is
counted by the storages it really makes, without memory. It holds the overlays to account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import active_fake_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.core.planning.step_trace import Freed
from fsdp_magic.core.specs import ModelSpec
from fsdp_magic.engine.parallel import activation_checkpointing, precision, torch_private
from fsdp_magic.engine.parallel.wrapping import units_of
from fsdp_magic.engine.planning.cuda_kernels import cuda_kernels
from fsdp_magic.engine.planning.fake_mode import PlanningMode, known_values
from fsdp_magic.engine.planning.passes import Program
from fsdp_magic.engine.planning.tracker import Log, Taken, Tracker


@contextmanager
def fake_group(world_size: int) -> Iterator[DeviceMesh]:
    """Have a default process group of one rank of many inside, which sends nothing.

    Source: torch/testing/_internal/distributed/fake_pg.py; its collectives on fake tensors:
    torch/distributed/_tools/fake_collectives.py.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401  # registers them
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=store)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def exact_peak(
    build: Callable[[], Program],
    mesh: DeviceMesh,
    *,
    spec: ModelSpec,
    samples: int,
    micro_steps: int = 3,
) -> int:
    """Return the most bytes that rank 0 holds while it computes gradients, step after step.

    Gradients are dropped after each; there is no optimizer. Call it outside of any fake mode.

    Args:
        build: makes the program, called within a ``PlanningMode``.
        mesh: of a fake group.
        spec: how the model is spread.
        samples: of a micro-batch.
        micro_steps: how many are run.
    """
    log = Log()
    with PlanningMode() as fake, known_values():
        program = build()
        root = program.model
        _shard(root, mesh, spec)
        tracker = _ExactTracker(log, fake)
        for tensor in (*root.parameters(), *root.buffers()):
            tracker.add(tensor)
        with tracker:
            _run(program, samples, micro_steps, log)
        events = log.events
        log.begin()
    return _peak(events)


def spec_of(
    strategy: str,
    variant: TraceVariant = TraceVariant(),  # noqa: B008
    *,
    wrap: str = "blocks",
) -> ModelSpec:
    """Return the options of a strategy and a variant."""
    return ModelSpec(
        strategy=strategy,  # type: ignore[arg-type]
        precision=variant.precision,  # type: ignore[arg-type]
        activation_checkpointing=variant.activation_checkpointing or False,  # type: ignore[arg-type]
        wrap=wrap,
    )


def _shard(root: nn.Module, mesh: DeviceMesh, spec: ModelSpec) -> None:
    """Spread a model as ``engine/parallel/fsdp.py`` does, without its weights."""
    units = units_of(root, spec.wrap)
    activation_checkpointing.apply(root, units, spec)
    precision.cast_inputs(root, spec)
    whole = {p for p in root.parameters() if p.ndim == 0 or p.numel() == 0}
    whole |= precision.kept_as_made(root, spec)

    def shard(modules: Sequence[nn.Module], *, is_root: bool) -> None:
        fully_shard(
            list(modules) if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=not is_root and spec.strategy != "shard_grad_op",
            ignored_params=whole,
            mp_policy=precision.fsdp_policy(spec, is_root=is_root),
        )

    for unit in units:
        shard(unit, is_root=False)
    shard((root,), is_root=True)
    torch_private.settle_root(root)
    torch_private.set_divide_factor(root, 1.0)


def _run(program: Program, samples: int, micro_steps: int, log: Log) -> None:
    batch: Any = None
    for _ in range(micro_steps):
        log.is_backward = False
        batch = program.batch_of(samples)
        with cuda_kernels() if program.is_cuda else _nothing():
            loss = program.loss_of(batch)
            log.is_backward = True
            torch_private.run_backward(loss)
        del loss
        for parameter in program.model.parameters():
            parameter.grad = None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _ExactTracker(Tracker):  # type: ignore[no-untyped-call]
    """Counts a rank's own tensors, and none that only tell the shape of a whole one.

    What ``DTensor`` computes to know global shapes runs under another fake mode or in its sharding
    propagation, and is no memory.
    """

    def __init__(self, log: Log, fake: PlanningMode) -> None:
        super().__init__(log, [])
        self._fake = fake

    def add(self, tensor: torch.Tensor, operator: str = "") -> None:
        """Count a tensor's storage; of a sharded one that of its shard."""
        super().add(tensor.to_local() if isinstance(tensor, DTensor) else tensor, operator)

    def __enter__(self) -> Any:
        """Watch operators, and look away while shapes are propagated."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        self._kept = {name: getattr(ShardingPropagator, name) for name in _PROPAGATIONS}
        for name, function in self._kept.items():
            setattr(ShardingPropagator, name, self._unseen(function))
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        """Watch no longer."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        for name, function in self._kept.items():
            setattr(ShardingPropagator, name, function)
        return super().__exit__(*error)

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def unseen(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*args, **kwargs)

        return unseen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it returns, if it is this rank's."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if active_fake_mode() is not self._fake:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


_PROPAGATIONS = ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached")
"""Source: torch/distributed/tensor/_sharding_prop.py of torch 2.13."""


def _peak(events: Sequence[Any]) -> int:
    sizes: dict[int, int] = {}
    level = peak = 0
    for event in events:
        if isinstance(event, Taken):
            sizes[event.id] = event.bytes
            level += event.bytes
            peak = max(peak, level)
        elif isinstance(event, Freed):
            level -= sizes[event.id]
    return peak
