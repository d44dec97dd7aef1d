"""KERNEL: ``session.plan``: the session's model, data and last training cell, planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.planning.device import Device, cpu_engine
from fsdp_magic.core.planning.requests import BuiltReport, BuiltRequest, PlanRequest, TraceFailed
from fsdp_magic.core.protocol import TrainRequest
from fsdp_magic.core.specs import ModelSpec, PlanSpec
from fsdp_magic.core.specs.plan import GPU_MEMORY, RANKS_ON_HOST
from fsdp_magic.core.units import GIB
from fsdp_magic.notebook import planning
from fsdp_magic.notebook.help import takes_options
from fsdp_magic.notebook.inspection import Inspection
from fsdp_magic.notebook.options import spec_of

_NOT_COMPILED = "planned without --compile: what a compiled step saves is not counted"
_WRITE_A_CELL = "write the model into the cell of a %%fsdp_plan"


class Planning(Inspection):
    """What a session can predict."""

    @takes_options(PlanSpec, without=("output",))
    def plan(self, *, show: bool = True, **options: Any) -> planning.Plan:
        """Predict peak memory and the largest batch of the session's own training.

        Its model, data and last training cell are traced in a copy of rank 0's process; the engines
        stay as they are.

        Args:
            show: show the plan.
            **options: as below; they mean what they mean for ``%fsdp_plan``, and what is not given
                is the session's own.

        Returns:
            Peaks of any micro-batch size, and the largest that fits, by strategy.

        Raises:
            UsageError: if no training cell has run yet, or this one cannot be planned.
            CellFailedError: if the cell failed without memory.
        """
        spec = spec_of(options, PlanSpec, call="session.plan", numbers=self.number)
        return self.plan_from(spec, show=show)

    def plan_from(self, spec: PlanSpec, *, show: bool = True) -> planning.Plan:
        """Plan the session's own training as a spec says; see ``plan``."""
        training = self._plannable()
        built = self._built()
        (base,) = built.specs.values()
        world_size = spec.world_size or self.world_size
        device = self._device_for(spec, built, world_size=world_size)
        own_hosts = world_size == self.world_size
        variants = spec.variants(
            world_size=world_size,
            ranks_on_host=built.ranks_on_host if own_hosts else min(world_size, RANKS_ON_HOST),
            also=(base.strategy,),
        )
        if not own_hosts or world_size % (base.shard_size or 1):
            base = replace(base, shard_size=None)
        specs = planning.specs_of(spec, variants, base)
        if not spec.strategies:
            specs = planning.without_repeats(specs, is_cpu=device.kind == "cpu")
        accumulate = spec.accumulate or self.runs[-1].accumulate or 1
        made = self._planned(
            training, specs, device, world_size=world_size, accumulate=accumulate, spec=spec
        )
        if show:
            made.show()
        return made

    def _planned(
        self,
        training: TrainRequest,
        specs: Mapping[str, ModelSpec],
        device: Device,
        *,
        world_size: int,
        accumulate: int,
        spec: PlanSpec,
        timeout: float | None = None,
    ) -> planning.Plan:
        """Trace a training cell in rank 0's process, and plan it.

        Args:
            training: the cell.
            specs: how the model is spread, by the name of the strategy.
            device: of a rank.
            world_size: ranks.
            accumulate: micro-steps of a step.
            spec: what was asked for.
            timeout: seconds that it may take; None: any time.
        """
        request = PlanRequest(
            training=training,
            variants=planning.traced_variants(specs.values()),
            wraps=planning.wraps_of(specs.values()),
            sequence_length=spec.seq_len,
            device_kind=device.kind,
        )
        answer = self._quietly("plan", {0: request}, timeout=timeout)[0].report
        if isinstance(answer, TraceFailed):
            raise planning.failure_of(answer.failure)
        if any(each.compile for each in specs.values()):
            answer = replace(answer, notes=(*answer.notes, _NOT_COMPILED))
        return planning.plan_of(
            answer, specs, device, world_size=world_size, accumulate=accumulate, spec=spec
        )

    def _plannable(self) -> TrainRequest:
        """Return the last training cell.

        Raises:
            UsageError: if there is none, or none that can be planned.
        """
        training = self._history.training
        if training is None:
            raise UsageError(
                "%fsdp_plan plans the last training cell, and none has run; run a %%fsdp_train "
                f"cell first, or {_WRITE_A_CELL}"
            )
        if training.spec.manual:
            raise UsageError(
                "%fsdp_plan varies the batch of one forward, and the last training cell takes "
                f"whole steps (--manual); {_WRITE_A_CELL}"
            )
        if training.spec.data is None:
            raise UsageError(
                "%fsdp_plan varies the batch, and the last training cell read no --data; "
                f"{_WRITE_A_CELL}, with example_batch(b)"
            )
        return training

    def _built(self) -> BuiltReport:
        report: BuiltReport = self._quietly("built", {0: BuiltRequest()})[0].report
        if len(report.specs) != 1:
            names = ", ".join(report.specs) or "none"
            raise UsageError(
                f"%fsdp_plan plans one model, and the session has {names}; {_WRITE_A_CELL}"
            )
        return report

    def _device_for(self, spec: PlanSpec, built: BuiltReport, *, world_size: int) -> Device:
        """Return what is planned for: what was asked for, or the devices that are there."""
        capacity = built.capacity_bytes
        if spec.gpu_memory is None and capacity is not None and self.world_plan.device == "cpu":
            return cpu_engine(capacity)
        size = GPU_MEMORY if capacity is None else f"{capacity / GIB:.2f}GiB"
        return planning.device_for(spec, world_size=world_size, size=size)
