"""KERNEL: ``fsdp_magic.plan``: a cell is traced in a process of its own, and planned here.

Nothing here needs IPython or engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import CellFailedError, FsdpError, OutOfMemoryOnRankError, UsageError
from fsdp_magic.core.planning.device import Device, gpu
from fsdp_magic.core.planning.memory_plan import MemoryPlan, StrategyPlan
from fsdp_magic.core.planning.overlay import Setting
from fsdp_magic.core.planning.requests import (
    TraceFailed,
    TraceReport,
    TraceRequest,
    TraceVariant,
)
from fsdp_magic.core.planning.step_trace import StepTrace
from fsdp_magic.core.reply import Failure
from fsdp_magic.core.specs import ModelSpec, PlanSpec
from fsdp_magic.core.specs.compare import Variant
from fsdp_magic.core.specs.plan import GPU_MEMORY, RANKS_ON_HOST
from fsdp_magic.core.units import count_text
from fsdp_magic.notebook import display, trace_cache
from fsdp_magic.notebook.help import takes_options
from fsdp_magic.notebook.options import spec_of
from fsdp_magic.notebook.screen import Nowhere, Page, Screen
from fsdp_magic.notebook.tracer import traced
from fsdp_magic.panels import plan as panel
from fsdp_magic.panels import plan_terms
from fsdp_magic.panels.parts import plain
from fsdp_magic.panels.plan_view import view_of

_NAMES = itertools.count(1)


class Plan(MemoryPlan):
    """A plan that can be shown."""

    def frame(self, strategy: str | None = None) -> tuple[str, str]:
        """Return it as HTML and as text; see ``show``."""
        view = view_of(self, strategy=strategy, stamp=display.stamp())
        return panel.html(view), panel.text(view)

    def show(self, strategy: str | None = None) -> None:
        """Show the table, and memory over two steps.

        Args:
            strategy: whose memory over time; None: the recommended one's.
        """
        display.show(*self.frame(strategy))
        display.mark_shown(self)

    def show_terms(self, strategy: str | None = None, micro_batch_size: int | None = None) -> None:
        """Show every term of a strategy's figure, with its source."""
        what = (self, strategy or self.recommended, micro_batch_size)
        display.show(plan_terms.html(*what), plan_terms.text(*what))

    def _ipython_display_(self) -> None:
        """Show it where a cell ends in it, unless the cell has just shown it."""
        if not display.is_shown(self):
            self.show()


@takes_options(PlanSpec, without=("output",))
def plan(code: str, *, show: bool = True, name: str = "", **options: Any) -> Plan:
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


def plan_from(spec: PlanSpec, code: str, *, show: bool = True, name: str = "") -> Plan:
    """Plan a cell as a spec says; see ``plan``."""
    world_size = spec.world_size or 2
    device = device_for(spec, world_size=world_size)
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
    report = None if spec.no_cache else trace_cache.found(request)
    if report is None:
        report = _report_on(request, Page() if show else Nowhere())
        trace_cache.keep(request, report)
    made = plan_of(
        report, specs, device, world_size=world_size, accumulate=spec.accumulate or 1, spec=spec
    )
    if show:
        made.show()
    return made


def _report_on(request: TraceRequest, screen: Screen) -> TraceReport:
    """Trace a cell, and show what it prints as it comes."""

    def printed(stream: str, text: str) -> None:
        screen.write(stream, text)
        screen.flush()

    answer = traced(request, printed=printed)
    if isinstance(answer, TraceFailed):
        raise failure_of(answer.failure)
    return answer


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


def plan_of(
    report: TraceReport,
    specs: Mapping[str, ModelSpec],
    device: Device,
    *,
    world_size: int,
    accumulate: int,
    spec: PlanSpec,
) -> Plan:
    """Return the plan of what was traced.

    Args:
        report: of the traces.
        specs: how the model is spread, by the name of the strategy.
        device: of a rank.
        world_size: ranks.
        accumulate: micro-steps of a step.
        spec: what was asked for.
    """
    strategies = {
        name: StrategyPlan(
            name=name,
            trace=report.traces[traced_as(each)],
            setting=Setting(
                strategy=each.strategy,
                world_size=world_size,
                shard_size=each.shard_size,
                wrap=each.wrap,
                cpu_offload=each.cpu_offload,
                accumulate=accumulate,
                accumulate_sync=each.accumulate_sync,
                backend="nccl" if device.kind == "cuda" else "gloo",
            ),
        )
        for name, each in specs.items()
        if traced_as(each) in report.traces
    }
    return Plan(
        device=device,
        world_size=world_size,
        strategies=strategies,
        micro_batch_size=spec.micro_batch_size,
        model=_described(next(iter(report.traces.values()))),
        notes=(*report.notes, *_about_cache(report)),
        untraced={
            name: report.untraced[traced_as(each)]
            for name, each in specs.items()
            if traced_as(each) in report.untraced
        },
    )


def _about_cache(report: TraceReport) -> list[str]:
    return (
        ["traced before, and nothing that it read has changed; --no-cache traces again"]
        if report.cached
        else []
    )


def _described(trace: StepTrace) -> str:
    """Return what is planned, in words: ``GPT2LMHeadModel, 1.6B parameters``."""
    elements = sum(parameter.elements for parameter in trace.parameters.values())
    return f"{trace.modules[''].class_name}, {count_text(elements).replace('G', 'B')} parameters"


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


def device_for(spec: PlanSpec, *, world_size: int, size: str = GPU_MEMORY) -> Device:
    """Return the GPU that is planned for.

    Args:
        spec: what was asked for.
        world_size: ranks.
        size: of a GPU that nobody gave one of.

    Raises:
        UsageError: if it is neither a size nor a known card.
    """
    return gpu(
        spec.gpu_memory or size,
        world_size=world_size,
        context_bytes=spec.context_bytes,
        communication_bytes=spec.nccl_bytes,
    )
