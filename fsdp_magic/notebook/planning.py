"""KERNEL: ``fsdp_magic.plan``: a cell is traced in a process of its own, and planned here.

Nothing here needs IPython or engines.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import CellFailedError, FsdpError, OutOfMemoryOnRankError, UsageError
from fsdp_magic.core.planning.device import Device
from fsdp_magic.core.planning.memory_plan import MemoryPlan, StrategyPlan
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.requests import (
    TraceFailed,
    TraceReport,
    TraceRequest,
    TraceVariant,
)
from fsdp_magic.core.reply import Failure
from fsdp_magic.core.specs import ModelSpec, PlanSpec
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.specs.plan import GPU_MEMORY, RANKS_ON_HOST
from fsdp_magic.core.units import bytes_text, parse_bytes
from fsdp_magic.notebook import display
from fsdp_magic.notebook.help import takes_options
from fsdp_magic.notebook.options import spec_of
from fsdp_magic.notebook.screen import Nowhere, Page
from fsdp_magic.notebook.tracer import traced
from fsdp_magic.panels.parts import plain

_NAMES = itertools.count(1)


@takes_options(PlanSpec, without=("output",))
def plan(code: str, *, show: bool = True, name: str = "", **options: Any) -> MemoryPlan:
    """Predict peak memory and the largest batch for hardware that is not here.

    The code runs without weights, without a GPU and without engines, in a process of its own.

    Args:
        code: binds ``model`` and, if it likes, ``optimizer`` (else AdamW), ``example_batch(b)``
            and ``loss_fn(model, batch)``; models of transformers have defaults for both.
        show: show the plan.
        name: file name in tracebacks; each call has one of its own.
        **options: as below; they mean what they mean for ``%%fsdp_plan``.

    Returns:
        Peaks of any micro-batch size, and the largest that fits, by strategy.

    Raises:
        UsageError: if an option cannot work, or the code describes no program.
        CellFailedError: if it raised.
        KeyboardInterrupt: if it was interrupted; nothing is left of it.
    """
    return plan_from(spec_of(options, PlanSpec, call="fsdp_magic.plan"), code, show=show, name=name)


def plan_from(spec: PlanSpec, code: str, *, show: bool = True, name: str = "") -> MemoryPlan:
    """Plan a cell as a spec says; see ``plan``."""
    device = device_for(spec)
    world_size = spec.world_size or 2
    variants = spec.variants(world_size=world_size, ranks_on_host=min(world_size, RANKS_ON_HOST))
    specs = specs_of(spec, variants)
    request = TraceRequest(
        code=code,
        name=name or f"<%%fsdp_plan [run {next(_NAMES)}]>",
        variants=traced_variants(specs.values()),
        wraps=wraps_of(specs.values()),
        sequence_length=spec.seq_len,
        device_kind=device.kind,
    )
    screen = Page() if show else Nowhere()
    answer = traced(request, printed=screen.write)
    screen.flush()
    if isinstance(answer, TraceFailed):
        raise failure_of(answer.failure)
    made = memory_plan(
        answer, specs, device=device, world_size=world_size, accumulate=spec.accumulate or 1
    )
    if show:
        show_plan(made, answer, spec)
    return made


def specs_of(
    spec: PlanSpec, variants: tuple[Variant, ...], base: ModelSpec | None = None
) -> dict[str, ModelSpec]:
    """Return how the model is spread by each strategy, by its name.

    Args:
        spec: what was asked for.
        variants: the strategies.
        base: what a strategy does not name; None: the defaults.
    """
    given = {
        name: value
        for name in ("precision", "wrap", "accumulate_sync")
        if (value := getattr(spec, name)) is not None
    }
    kept = replace(base or ModelSpec(), **given)
    return {variant.name: variant.applied(kept) for variant in variants}


def traced_as(spec: ModelSpec) -> TraceVariant:
    """Return what the trace of a model that is spread so is made with."""
    return TraceVariant(spec.precision, spec.activation_checkpointing or "")


def traced_variants(specs: Iterable[ModelSpec]) -> tuple[TraceVariant, ...]:
    """Return what must be traced, each once."""
    return tuple(dict.fromkeys(map(traced_as, specs)))


def wraps_of(specs: Iterable[ModelSpec]) -> tuple[str, ...]:
    """Return the rules whose units are wanted, each once."""
    return tuple(dict.fromkeys(spec.wrap for spec in specs))


def without_repeats(specs: Mapping[str, ModelSpec], *, is_cpu: bool) -> dict[str, ModelSpec]:
    """Return strategies without those that are another one for this model.

    Args:
        specs: by name.
        is_cpu: whether shards are in host memory anyway.
    """
    kept: dict[ModelSpec, str] = {}
    for name, spec in specs.items():
        kept.setdefault(replace(spec, cpu_offload=False) if is_cpu else spec, name)
    return {name: specs[name] for name in kept.values()}


def memory_plan(
    report: TraceReport,
    specs: Mapping[str, ModelSpec],
    *,
    device: Device,
    world_size: int,
    accumulate: int,
) -> MemoryPlan:
    """Return the plan of what was traced.

    Args:
        report: of the traces.
        specs: how the model is spread, by the name of the strategy.
        device: of a rank.
        world_size: ranks.
        accumulate: micro-steps of a step.
    """
    strategies = {
        name: StrategyPlan(
            name=name,
            trace=report.traces[traced_as(spec)],
            setting=Setting(
                strategy=spec.strategy,
                world_size=world_size,
                shard_size=spec.shard_size,
                wrap=spec.wrap,
                cpu_offload=spec.cpu_offload,
                accumulate=accumulate,
                accumulate_sync=spec.accumulate_sync,
                backend="nccl" if device.kind == "cuda" else "gloo",
            ),
        )
        for name, spec in specs.items()
    }
    return MemoryPlan(device=device, world_size=world_size, strategies=strategies)


def failure_of(failure: Failure) -> FsdpError:
    """Return the exception that tells why a cell could not be traced."""
    if failure.kind == "usage":
        return UsageError(failure.message)
    lines = [plain(failure.traceback).strip("\n")] if failure.traceback else []
    raised = f"{failure.exception_type}: {plain(failure.message).rstrip()}".removesuffix(": ")
    text = "\n".join((*lines, raised, *map(plain, failure.notes)))
    if failure.kind == "out_of_memory":
        text += (
            "\nThe planning process ran out of this machine's memory: let the cell load no data "
            "or weights, only build `model`"
        )
        return OutOfMemoryOnRankError(text, exceptions={0: failure})
    return CellFailedError(text, exceptions={0: failure})


def device_for(spec: PlanSpec) -> Device:
    """Return the GPU that is planned for.

    Raises:
        UsageError: if it is neither a size nor a known card.
    """
    text = spec.gpu_memory or GPU_MEMORY
    return Device(name=text, capacity_bytes=parse_bytes(text, what="--gpu-memory"))


def cpu_device(capacity_bytes: int) -> Device:
    """Return what a CPU engine may allocate, as a device."""
    return Device(
        name="CPU engine",
        kind="cpu",
        capacity_bytes=capacity_bytes,
        context_bytes=0,
        communication_bytes=0,
    )


def show_plan(made: MemoryPlan, report: TraceReport, spec: PlanSpec) -> tuple[str, str]:
    """Show a plan, and return it as HTML and as text."""
    b = spec.micro_batch_size or 1
    rows = [f"{'strategy':40} peak at {b}"]
    rows += [f"{name:40} {bytes_text(made.peak_bytes(name, b)):>9}" for name in made.strategies]
    text = "\n".join((*rows, *report.notes))
    frame = f"<pre>{html.escape(text)}</pre>", text
    display.show(*frame)
    return frame
